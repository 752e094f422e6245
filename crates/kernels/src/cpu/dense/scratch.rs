//! Work memory of a thread, kept between tasks and aligned to cache lines.

use std::cell::RefCell;

/// Cache line, in f32.
const LINE: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with `len` floats that start on a cache line. Their contents are whatever was left there.
/// Calls must not nest.
pub fn with_scratch<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|buffer| {
        if buffer.len() < len + LINE {
            buffer.resize(len + LINE, 0.0);
        }
        let skip = buffer.as_ptr().align_offset(LINE * 4).min(LINE);
        work(&mut buffer[skip..skip + len])
    })
}
