//! The pure core: every decision Grapevine takes, with time, randomness and the view as arguments.
