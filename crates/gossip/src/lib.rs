//! Replicas tell each other what a hash cannot know.
