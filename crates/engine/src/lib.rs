//! A simulated vLLM: a real HTTP server that queues, caches and slows down as engines do.
