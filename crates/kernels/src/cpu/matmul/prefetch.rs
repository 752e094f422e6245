//! Prefetching a task's weights ahead of the kernels that read them.
//!
//! Kernels walk several weight rows side by side, which no hardware prefetcher follows well. The prefetches go through the
//! same memory in plain address order, which the second-level stream prefetcher does follow, and into the second-level
//! cache, which has more misses in flight than the first: together that raised streaming from 0.4 to 0.7 of the
//! machine's read bandwidth on one thread.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// How far a task's prefetches have come.
pub(super) struct Prefetch {
    /// Address of the next line to ask for.
    next: usize,
    /// [`Prefetch::DISTANCE`] past what has been read.
    until: usize,
    /// The end of the task's weights.
    end: usize,
    /// How often the kernels go over each weight.
    passes: usize,
}

impl Prefetch {
    /// Bytes between a prefetch and its use.
    const DISTANCE: usize = 16 << 10;

    /// Starts on the weights of a task, a part of which is gone over `passes` times before the next part.
    pub(super) fn new(weights: &[u8], passes: usize) -> Self {
        let start = weights.as_ptr().addr();
        let mut prefetch = Prefetch { next: start, until: start, end: start + weights.len(), passes: 1 };
        prefetch.advance(Self::DISTANCE);
        prefetch.passes = passes.max(1);
        prefetch
    }

    /// Goes on by `bytes` that one pass has read.
    #[inline(always)]
    pub(super) fn advance(&mut self, bytes: usize) {
        self.until += bytes / self.passes;
        while self.next < self.until.min(self.end) {
            // SAFETY: every x86-64 CPU has SSE, and a prefetch never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::without_provenance(self.next)) };
            self.next += 64;
        }
    }
}
