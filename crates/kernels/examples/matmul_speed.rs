//! Speed of the matmul kernels on weights that do not fit the caches, beside the machine's read bandwidth.
//!
//! usage: cargo run --release -p strata-kernels --example matmul_speed -- [threads [megabytes [types [rows]]]]
//!   e.g. `-- 2 512 Q4_K,Q8_0 1,2,4,256`
//!
//! Prints for each format and number of activation rows: weight bytes read per second, the share of the read bandwidth
//! measured around it, the time against one row, and multiplications per second. `STRATA_SIMD` picks the kernels.

use std::time::Instant;
use strata_kernels::Matrix;
use strata_kernels::cpu::{Activations, Pool, Simd, bandwidth, matmul};
use strata_kernels::format::TensorType;

const COLS: usize = 2048;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).and_then(|arg| arg.parse().ok()).unwrap_or(default);
    let pool = Pool::new(number(0, std::thread::available_parallelism().map_or(1, usize::from)));
    let megabytes = number(1, 512);
    let types = args.get(2).map_or("Q8_0,Q4_K,Q5_K,Q6_K,F16", String::as_str);
    let rows = args.get(3).map_or("1,2,3,4,8,16,64,256", String::as_str);
    println!("{:?}, {} threads, {COLS} columns, {megabytes} MB of weights", Simd::current(), pool.threads());
    for name in types.split(',') {
        let Some(ty) = TensorType::from_name(name).filter(|ty| ty.computable()) else {
            eprintln!("{name}: not a type strata computes with");
            continue;
        };
        let row_bytes = ty.row_bytes(COLS).expect("2048 is a multiple of every block");
        let w_rows = ((megabytes << 20) / row_bytes) & !15;
        let w = Matrix { ty, rows: w_rows, cols: COLS, data: noise(ty, w_rows * row_bytes).into() };
        let mut one_row = 0.0;
        for n in rows.split(',').filter_map(|n| n.parse::<usize>().ok()) {
            // Many rows are bound by arithmetic: less of the matrix is enough.
            let part = if n > 8 { (w_rows * 8 / n).next_multiple_of(16).min(w_rows) } else { w_rows };
            let w = Matrix { rows: part, data: w.data.slice(..part * row_bytes), ..w.clone() };
            let x: Vec<f32> = (0..n * COLS).map(|i| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0).collect();
            let mut activations = Activations::new();
            let mut out = vec![0.0; n * part];
            let mut times = Vec::new();
            let mut reads = Vec::new();
            for _ in 0..7 {
                reads.push(bandwidth::measure(&pool));
                activations.set(&x, n, COLS);
                let start = Instant::now();
                matmul(&pool, &mut [(&w, &mut out)], &activations);
                times.push(start.elapsed().as_secs_f64());
            }
            let (time, read) = (times.into_iter().fold(f64::INFINITY, f64::min), median(reads));
            let cached = cached_speed(&w, n);
            let bytes = (part * row_bytes) as f64;
            let per_row = time / part as f64;
            if one_row == 0.0 {
                one_row = per_row;
            }
            println!(
                "{name:5} {n:4} rows: {:6.2} GB/s = {:5.1}% of {:5.2} GB/s, {:5.2} x the first, {:6.1} G mul/s; cached {:5.1} GB/s, {:6.1} G mul/s per thread",
                bytes / time / 1e9,
                100.0 * bytes / time / read,
                read / 1e9,
                per_row / one_row,
                (part * COLS * n) as f64 / time / 1e9,
                cached * row_bytes as f64 / 1e9,
                cached * (COLS * n) as f64 / 1e9,
            );
        }
    }
}

/// Weight rows per second of one thread on half a megabyte of weights, which stays in the second-level cache: what the
/// arithmetic alone would allow.
fn cached_speed(w: &Matrix, n: usize) -> f64 {
    let pool = Pool::new(1);
    let row_bytes = w.data.len() / w.rows;
    let rows = ((512 << 10) / row_bytes).min(w.rows) & !15;
    let w = Matrix { rows, data: w.data.slice(..rows * row_bytes), ..w.clone() };
    let mut activations = Activations::new();
    activations.set(&vec![0.5; n * COLS], n, COLS);
    let mut out = vec![0.0; n * rows];
    let best = (0..20)
        .map(|_| {
            let start = Instant::now();
            matmul(&pool, &mut [(&w, &mut out)], &activations);
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    rows as f64 / best
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Random bytes with scales of a sane size.
fn noise(ty: TensorType, len: usize) -> Vec<u8> {
    let mut state = 88172645463325252u64;
    let mut data = vec![0u8; len];
    for word in data.as_chunks_mut::<8>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state.to_le_bytes();
    }
    for block in data.chunks_mut(ty.block_bytes()) {
        match ty {
            TensorType::Q8_0 => block[..2].copy_from_slice(&[0, 0x10]),
            TensorType::Q4_K | TensorType::Q5_K => block[..4].copy_from_slice(&[0, 0x10, 0, 0x10]),
            TensorType::Q6_K => block[208..].copy_from_slice(&[0, 0x10]),
            TensorType::F32 => block[3] &= 0x3f,
            _ => block[1] &= 0x3f,
        }
    }
    data
}
