//! The HTTP edge: data plane, streaming relay, admin plane.
