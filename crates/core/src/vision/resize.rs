//! The size a picture is brought to, and the resampling.
