//! Speed and memory, as ratios against something real.
