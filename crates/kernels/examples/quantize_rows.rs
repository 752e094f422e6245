//! Quantizes a raw file of f32 rows and prints the speed of each type (million weights per second of
//! CPU time, one thread); `scripts/check_conversion.py` compares
//! the result with ggml's.
//!
//! `cargo run --release -p strata-kernels --example quantize_rows -- FILE COLS OUT_PREFIX TYPE...` writes `OUT_PREFIX.TYPE`.

use std::error::Error;
use strata_kernels::format::{TensorType, quantize};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, cols, prefix, types @ ..] = args.as_slice() else { return Err("FILE COLS OUT_PREFIX TYPE...".into()) };
    let rows: Vec<f32> = std::fs::read(file)?.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let cols: usize = cols.parse()?;
    for name in types {
        let ty = TensorType::from_name(name).ok_or("unknown type")?;
        let mut out = vec![0; ty.row_bytes(rows.len()).ok_or("no whole blocks")?];
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = cpu_seconds()?;
            quantize(ty, &rows, None, cols, &mut out)?;
            best = best.min(cpu_seconds()? - start);
        }
        println!("{name} {}", rows.len() as f64 / best / 1e6);
        std::fs::write(format!("{prefix}.{name}"), &out)?;
    }
    Ok(())
}

/// CPU time of this thread, which other work on the machine does not lengthen.
fn cpu_seconds() -> Result<f64, std::io::Error> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a live timespec that the call fills.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9)
}
