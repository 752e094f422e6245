//! What an empty parallel region costs: `cargo run --release -p strata-kernels --example region_cost -- [THREADS]`.
//!
//! The forward pass opens some ten regions per layer and token. Prints nanoseconds per region of as many tasks as threads, for
//! rounds of 10,000 regions; how they vary tells how far apart the machine puts the cores.

use std::hint::black_box;
use std::time::Instant;
use strata_kernels::cpu::Pool;

fn main() {
    let threads = std::env::args().nth(1).and_then(|arg| arg.parse().ok());
    let pool = Pool::new(threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)));
    const REGIONS: u32 = 10_000;
    for _ in 0..10 {
        let start = Instant::now();
        for _ in 0..REGIONS {
            pool.run(pool.threads(), &|task| {
                black_box(task);
            });
        }
        println!("{:7.0} ns per region", start.elapsed().as_secs_f64() * 1e9 / f64::from(REGIONS));
    }
}
