//! A fixed thread pool for parallel regions of a few microseconds.
//!
//! The forward pass opens many short regions per token, so a region must not cost a system call while the pool is busy, and as
//! few cache lines as possible may wander between the cores: every worker has one line that holds its order, its share of the
//! tasks and its answer. Workers spin for a short while after each region and park only when nothing follows. Every thread,
//! the caller included, takes the tasks of its own share one by one and then those the others have not begun, so a worker that
//! wakes too late is not waited for. Which thread runs a task must never change a result (point 2 of the numerics contract).

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Spins of an idle worker before it parks; about 100 us, longer than the serial code between two regions.
const IDLE_SPINS: u32 = 4_000;
/// Spins of the caller waiting for the last tasks before it starts to yield its core.
const WAIT_SPINS: u32 = 20_000;
/// Threads of a pool at most.
const MOST_THREADS: usize = 1 << 16;

/// A worker's `order`: the number of the region, and below it one of the three.
const OPEN: u64 = 0;
const INSIDE: u64 = 1;
const CLOSED: u64 = 2;
const REGION_STEP: u64 = 4;

thread_local! {
    /// True while this thread runs tasks, so that a nested region runs inline instead of waiting for itself.
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// Tasks not yet begun of one thread's share: the next in the low half, the end in the high half. One word, so that nobody
/// can see one share's beginning with another's end.
#[derive(Default)]
struct Tasks(AtomicU64);

impl Tasks {
    fn set(&self, range: std::ops::Range<u32>) {
        self.0.store(u64::from(range.end) << 32 | u64::from(range.start), Ordering::Relaxed);
    }

    fn take(&self) -> Option<usize> {
        let is_empty = |word: u64| word as u32 >= (word >> 32) as u32;
        // A plain look first: what is used up must not be written to again and again, nor its low half run over.
        if is_empty(self.0.load(Ordering::Relaxed)) {
            return None;
        }
        let word = self.0.fetch_add(1, Ordering::Relaxed);
        (!is_empty(word)).then_some(word as u32 as usize)
    }

    fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// One thread's line. Number 0 belongs to the caller of the region, who needs only `tasks`.
#[repr(align(128))]
struct Line {
    order: AtomicU64,
    tasks: Tasks,
    /// The open region's task. Written only by the caller while `order` is `CLOSED`.
    job: UnsafeCell<Option<*const Task<'static>>>,
}

struct Shared {
    lines: Box<[Line]>,
    sleepers: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written only by the caller that holds the pool's lock while the worker's order is closed, and read only by
// the worker that entered through an open order (an acquire of the caller's release). The closure it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is only dereferenced inside the region that published it, see `Pool::run`.
unsafe impl Send for Shared {}

impl Shared {
    /// Runs the tasks of share `own`, then what is left of the others'.
    fn work(&self, own: usize, task: &Task<'_>) {
        let outer = IN_REGION.replace(true);
        let threads = self.lines.len();
        for share in (own..threads).chain(0..own) {
            while let Some(index) = self.lines[share].tasks.take() {
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index))) {
                    // The rest of the region is pointless: take it away so that everyone leaves.
                    self.lines.iter().for_each(|line| line.tasks.clear());
                    lock(&self.panic).get_or_insert(payload);
                    self.panicked.store(true, Ordering::Relaxed);
                }
            }
        }
        IN_REGION.set(outer);
    }

    fn worker(&self, own: usize) {
        let line = &self.lines[own];
        let mut idle = 0;
        loop {
            let order = line.order.load(Ordering::Acquire);
            if order % REGION_STEP == OPEN {
                let enter = line.order.compare_exchange(order, order + INSIDE, Ordering::AcqRel, Ordering::Relaxed);
                if enter.is_err() {
                    continue;
                }
                // SAFETY: the order was open when we entered, so `job` holds this region's closure, and the caller does not
                // return from `run` (nor write `job` again) before we have closed the order.
                let task = unsafe { (*line.job.get()).expect("an open order has a job") };
                // SAFETY: as above; the closure outlives the region.
                self.work(own, unsafe { &*task });
                line.order.store(order + CLOSED, Ordering::Release);
                idle = 0;
                continue;
            }
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            idle += 1;
            if idle < IDLE_SPINS {
                std::hint::spin_loop();
                continue;
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let work_waits = line.order.load(Ordering::SeqCst) % REGION_STEP == OPEN;
            if !work_waits && !self.stop.load(Ordering::SeqCst) {
                std::thread::park();
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            idle = 0;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A fixed set of threads that run the tasks of one region at a time.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads, the caller of [`Pool::run`] included; 0 counts as 1. Threads the system refuses to
    /// start are left out, so ask [`Pool::threads`] for the real number.
    pub fn new(threads: usize) -> Pool {
        let line = || Line { order: AtomicU64::new(CLOSED), tasks: Tasks::default(), job: UnsafeCell::new(None) };
        let shared = Arc::new(Shared {
            lines: (0..threads.clamp(1, MOST_THREADS)).map(|_| line()).collect(),
            sleepers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let workers = (1..shared.lines.len())
            .map_while(|own| {
                let shared = shared.clone();
                std::thread::Builder::new().name(format!("strata-pool-{own}")).spawn(move || shared.worker(own)).ok()
            })
            .collect();
        Pool { shared, workers, caller: Mutex::new(()) }
    }

    /// The number of threads that run tasks, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0) .. task(n_tasks - 1)`, each once, in any order and on any thread of the pool, and returns when all
    /// have ended. A region started inside a task runs inline on that thread; regions of different callers take turns.
    ///
    /// # Panics
    /// Passes on the first panic of a task, after every running task has ended; tasks not yet begun are skipped.
    pub fn run(&self, n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        // More tasks than a share can count (or one thread) run inline as well.
        if n_tasks <= 1 || self.workers.is_empty() || IN_REGION.get() || n_tasks >= (u32::MAX / 2) as usize {
            for index in 0..n_tasks {
                task(index);
            }
            return;
        }
        let turn = lock(&self.caller);
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed. The pointer is used by workers inside this region only, and this function
        // closes every order and waits for those inside before it returns, so the borrow outlives every use.
        let erased = unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        let threads = self.threads().min(n_tasks);
        let share = |own: usize| (own * n_tasks / threads) as u32..((own + 1) * n_tasks / threads) as u32;
        for (own, line) in shared.lines.iter().enumerate().take(threads).skip(1) {
            line.tasks.set(share(own));
            // SAFETY: we hold `caller` and the order is closed: no other access to `job` is possible.
            unsafe { *line.job.get() = Some(erased) };
            let closed = line.order.load(Ordering::Relaxed);
            line.order.store(closed - CLOSED + REGION_STEP + OPEN, Ordering::SeqCst);
        }
        shared.lines[0].tasks.set(share(0));
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            self.workers.iter().take(threads - 1).for_each(|worker| worker.thread().unpark());
        }
        shared.work(0, task);
        for line in shared.lines.iter().take(threads).skip(1) {
            let mut spins = 0;
            loop {
                let order = line.order.load(Ordering::Acquire);
                let state = order % REGION_STEP;
                // A worker that has not come yet finds the door closed: its tasks are done.
                if state == CLOSED
                    || (state == OPEN
                        && line
                            .order
                            .compare_exchange(order, order + CLOSED, Ordering::AcqRel, Ordering::Relaxed)
                            .is_ok())
                {
                    break;
                }
                spins += 1;
                if spins < WAIT_SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
        }
        let panic = shared.panicked.swap(false, Ordering::Relaxed).then(|| lock(&shared.panic).take()).flatten();
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Splits `0..len` into at most `parts` ranges of equal length (the last may be shorter), each a multiple of `unit`
    /// long but for the end, and runs `task` on each.
    pub fn run_ranges(&self, len: usize, parts: usize, unit: usize, task: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let unit = unit.max(1);
        let step = len.div_ceil(parts.max(1)).div_ceil(unit).max(1) * unit;
        self.run(len.div_ceil(step), &|index| task(index * step..len.min((index + 1) * step)));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker cannot panic: every task runs under `catch_unwind`.
            let _ = worker.join();
        }
    }
}

/// A slice that the tasks of one region write in disjoint parts.
pub struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `range`, whose caller promises that no two live parts overlap.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}
// SAFETY: as a `&mut [T]`.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Borrows `slice` for the length of a region.
    pub fn new(slice: &'a mut [T]) -> Self {
        SharedSlice { start: slice.as_mut_ptr(), len: slice.len(), borrow: std::marker::PhantomData }
    }

    /// The length of the whole slice.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a slice of no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first element, for tasks whose parts are not one range, such as columns of a matrix. Reading or writing
    /// through it follows the rules of [`SharedSlice::range`].
    pub fn as_ptr(&self) -> *mut T {
        self.start
    }

    /// The part `range`.
    ///
    /// # Safety
    /// No other part that overlaps `range` may be alive, on this or another thread.
    ///
    /// # Panics
    /// When `range` reaches past the slice.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn range(&self, range: std::ops::Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of a slice of {}", self.len);
        // SAFETY: in bounds by the check above, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            for round in 0..200 {
                let n = round % 37;
                let counts: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n, &|index| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_parked_pool_wakes() {
        let pool = Pool::new(3);
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let sum = AtomicUsize::new(0);
            pool.run(100, &|index| {
                sum.fetch_add(index, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4950);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        for bad in [0, 5, 63] {
            let result = catch_unwind(AssertUnwindSafe(|| pool.run(64, &|index| assert_ne!(index, bad, "task {bad}"))));
            assert!(result.is_err());
            let ran = AtomicUsize::new(0);
            pool.run(64, &|_| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.into_inner(), 64);
        }
    }

    #[test]
    fn nested_and_concurrent_regions_complete() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.run(4, &|_| {
                            pool.run(4, &|_| {
                                sum.fetch_add(1, Ordering::Relaxed);
                            })
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 50 * 16);
    }

    #[test]
    fn ranges_cover_everything_in_units() {
        let pool = Pool::new(2);
        for (len, parts, unit) in [(0, 4, 8), (1, 4, 8), (100, 3, 8), (64, 64, 1), (7, 100, 4)] {
            let mut seen = vec![0u8; len];
            let shared = SharedSlice::new(&mut seen);
            pool.run_ranges(len, parts, unit, &|range| {
                assert_eq!(range.start % unit, 0);
                // SAFETY: the ranges of one call do not overlap.
                unsafe { shared.range(range) }.iter_mut().for_each(|value| *value += 1);
            });
            assert!(seen.iter().all(|&count| count == 1));
        }
    }
}
