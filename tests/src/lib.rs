//! Field cases and cluster tests over real sockets.
