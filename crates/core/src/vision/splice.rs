//! The places and positions of tokens and pictures in a prompt.
