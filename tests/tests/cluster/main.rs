//! What a cluster promises, over real sockets: replicas are processes, engines run in the test.

mod agreement;
mod bounds;
mod deaths;
mod forms;
mod heirs;
mod home;
mod joining;
mod load;
mod pairs;
mod policies;
mod queue;
mod resume;
