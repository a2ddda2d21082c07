//! Faults under load, and the invariants that must hold.
