//! Settings of the C library's allocator for processes that run for long.
//!
//! A server allocates states and checkpoints of hundreds of kilobytes on some threads and frees them on others. glibc raises by
//! itself the size from which a block gets a mapping of its own, and keeps up to eight heaps per core; both leave holes that
//! are never given back, and memory creeps up for hours. With fixed settings it stays at what is in use.

/// Blocks from this size on have a mapping of their own, which goes back to the system when they are freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const OWN_MAPPING: libc::c_int = 256 << 10;
/// Heaps that the threads share.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const HEAPS: libc::c_int = 2;

/// Settles the allocator. To be called before threads are started; does nothing where the C library is another.
pub fn settle() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt only changes tuning parameters; a value it does not like it refuses, which changes nothing.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING);
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
    }
}
