//! Discrete-event simulation of many replicas over many engines on the real core.
