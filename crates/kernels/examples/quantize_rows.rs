//! Quantizes a raw file of f32 rows and prints the speed of each type on one thread; `scripts/check_conversion.py` compares
//! the result with ggml's.
//!
//! `cargo run --release -p strata-kernels --example quantize_rows -- FILE COLS OUT_PREFIX TYPE...` writes `OUT_PREFIX.TYPE`.

use std::error::Error;
use std::time::Instant;
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
            let start = Instant::now();
            quantize(ty, &rows, None, cols, &mut out)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!("{name} {}", rows.len() as f64 / best / 1e6);
        std::fs::write(format!("{prefix}.{name}"), &out)?;
    }
    Ok(())
}
