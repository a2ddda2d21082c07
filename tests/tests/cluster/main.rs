//! What a cluster promises, over real sockets: replicas are processes, engines run in the test.

mod agreement;
mod forms;
mod home;
