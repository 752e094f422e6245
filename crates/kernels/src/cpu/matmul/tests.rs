//! Every kernel against the scalar reference, bit for bit, and the reference against plain f64 arithmetic.

use super::*;
use crate::format::dequantize;

const TYPES: [TensorType; 7] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q8_0,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
];

/// xorshift64*
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In -1..1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// Any bits in the quantized fields, halves and floats of a sane size. Every third matrix row or so has extreme
    /// fields: all bits set, or only the sign bits (`i8` weights and scales of -128).
    fn matrix(&mut self, ty: TensorType, rows: usize, cols: usize) -> Matrix {
        let mut data = vec![0u8; rows * ty.row_bytes(cols).unwrap()];
        let bytes = ty.block_bytes();
        for block in data.chunks_mut(bytes) {
            match self.next() % 9 {
                0 => block.fill(0xff),
                1 => block.fill(0x80),
                _ => block.iter_mut().for_each(|byte| *byte = (self.next() >> 32) as u8),
            }
            let half = half::f16::from_f32(if self.next().is_multiple_of(16) { 0.0 } else { self.float() * 0.01 })
                .to_le_bytes();
            match ty {
                TensorType::F32 => block.copy_from_slice(&self.float().to_le_bytes()),
                TensorType::F16 => block.copy_from_slice(&half),
                TensorType::BF16 => block.copy_from_slice(&half::bf16::from_f32(self.float()).to_le_bytes()),
                TensorType::Q8_0 => block[..2].copy_from_slice(&half),
                TensorType::Q4_K | TensorType::Q5_K => {
                    block[..2].copy_from_slice(&half);
                    block[2..4].copy_from_slice(&half::f16::from_f32(self.float() * 0.01).to_le_bytes());
                }
                _ => block[208..].copy_from_slice(&half),
            }
        }
        // One byte in front, so that blocks do not start at even addresses.
        data.insert(0, 0);
        Matrix { ty, rows, cols, data: bytes::Bytes::from(data).slice(1..) }
    }

    /// Rows of values, some with blocks that are all zero, tiny, huge or at one extreme.
    fn activations(&mut self, rows: usize, cols: usize) -> Activations {
        let mut x = self.floats(rows * cols);
        for part in x.chunks_mut(32) {
            match self.next() % 12 {
                0 => part.fill(0.0),
                1 => part.fill(-3.0),
                2 => part.iter_mut().for_each(|v| *v = 2.0 * v.signum()),
                3 => part.iter_mut().for_each(|v| *v *= 1e-6),
                4 => part.iter_mut().for_each(|v| *v *= 1e4),
                _ => {}
            }
        }
        let mut activations = Activations::new();
        activations.set(&x, rows, cols);
        activations
    }
}

/// One matrix, all rows.
fn matmul_with(simd: Simd, pool: &Pool, w: &Matrix, out: &mut [f32], x: &Activations) {
    multiply_with(simd, pool, &mut [Product { w, x, rows: Rows::All, out }]);
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn scalar_result(w: &Matrix, x: &Activations) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.rows() * w.rows];
    matmul_with(Simd::Scalar, &Pool::new(1), w, &mut out, x);
    out
}

#[test]
fn the_reference_agrees_with_f64_arithmetic_on_dequantized_weights() {
    let mut random = Random(1);
    for ty in TYPES {
        let (rows, cols, n) = (9, 512, 3);
        let w = random.matrix(ty, rows, cols);
        let mut x = Activations::new();
        x.set(&random.floats(n * cols), n, cols);
        let out = scalar_result(&w, &x);
        let mut weights = vec![0.0; rows * cols];
        dequantize(ty, &w.data, &mut weights).unwrap();
        // Rounding activations to 8 bits moves each by at most half a step, that is amax / 254.
        let step = if ty.block_size() == 1 { 1e-6 } else { 1.0 / 254.0 };
        for r in 0..n {
            for o in 0..rows {
                let pairs = || weights[o * cols..][..cols].iter().zip(&x.values()[r * cols..][..cols]);
                let exact: f64 = pairs().map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                let size: f64 = pairs().map(|(&w, _)| f64::from(w.abs())).sum();
                let got = f64::from(out[r * rows + o]);
                assert!((got - exact).abs() <= size * step * 1.01 + 1e-6, "{ty} {r} {o}: {got} {exact}");
            }
        }
    }
}

#[test]
fn every_level_row_count_and_thread_count_gives_the_bits_of_the_reference() {
    let mut random = Random(2);
    let pools = [Pool::new(1), Pool::new(3)];
    for ty in TYPES {
        let widths: &[usize] = if ty.block_size() == 1 {
            &[1, 15, 64, 100, 520]
        } else if ty.block_size() == 32 {
            &[32, 96, 256, 544]
        } else {
            &[256, 768, 1024]
        };
        for &cols in widths {
            for rows in [1, 3, 16, 37] {
                let w = random.matrix(ty, rows, cols);
                for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 33, 64, 100] {
                    let x = random.activations(n, cols);
                    let expected = scalar_result(&w, &x);
                    for level in Simd::available() {
                        for pool in &pools {
                            let mut out = vec![f32::NAN; n * rows];
                            matmul_with(level, pool, &w, &mut out, &x);
                            assert_eq!(bits(&out), bits(&expected), "{level:?} {ty} {rows} x {cols}, {n} rows");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn quantized_activations_are_the_same_at_every_level() {
    let mut random = Random(3);
    let pool = Pool::new(2);
    for n in [1, 5, 200] {
        let x = random.activations(n, 768);
        let (mut reference, mut other) = (Families::default(), Families::default());
        reference.per_block.ensure(&pool, Simd::Scalar, x.values(), n, 768);
        reference.per_superblock.ensure(&pool, Simd::Scalar, x.values(), n, 768);
        other.per_block.ensure(&pool, Simd::detect(), x.values(), n, 768);
        other.per_superblock.ensure(&pool, Simd::detect(), x.values(), n, 768);
        for row in 0..n {
            for (a, b) in [
                (reference.per_block.row(row), other.per_block.row(row)),
                (reference.per_superblock.row(row), other.per_superblock.row(row)),
            ] {
                assert_eq!((a.q, bits(a.d), a.sums), (b.q, bits(b.d), b.sums));
                assert!(a.q.iter().all(|&v| v > -128));
            }
        }
    }
}

#[test]
fn a_value_that_is_not_finite_reaches_every_output() {
    let mut random = Random(4);
    for ty in TYPES {
        let w = random.matrix(ty, 16, 256);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = vec![1.0; 256];
            values[77] = bad;
            let mut x = Activations::new();
            x.set(&values, 1, 256);
            for level in Simd::available() {
                let mut out = vec![0.0; 16];
                matmul_with(level, &Pool::new(1), &w, &mut out, &x);
                assert!(out.iter().all(|v| !v.is_finite()), "{level:?} {ty} {bad}: {out:?}");
            }
        }
    }
}

#[test]
fn several_matrices_in_one_region_equal_one_at_a_time() {
    let mut random = Random(5);
    let pool = Pool::new(2);
    let ws: Vec<Matrix> = (0..11).map(|i| random.matrix(TYPES[i % 7], 5 + 7 * i, 256)).collect();
    let x = random.activations(3, 256);
    let mut outs: Vec<Vec<f32>> = ws.iter().map(|w| vec![f32::NAN; 3 * w.rows]).collect();
    let mut pairs: Vec<_> = ws.iter().zip(&mut outs).map(|(w, out)| (w, out.as_mut_slice())).collect();
    matmul(&pool, &mut pairs, &x);
    for (w, out) in ws.iter().zip(&outs) {
        assert_eq!(bits(out), bits(&scalar_result(w, &x)));
    }
}

#[test]
fn experts_give_the_bits_of_single_rows() {
    let mut random = Random(6);
    let (experts, width, cols) = (4, 37, 256);
    for ty in TYPES {
        let w = random.matrix(ty, experts * width, cols);
        for n in [1usize, 3, 40] {
            let x = random.activations(n, cols);
            // Every row goes to two experts; expert 2 gets none.
            let mut rows: Vec<(Vec<u32>, Vec<u32>)> = vec![Default::default(); experts];
            for row in 0..n as u32 {
                for (k, expert) in [[0, 1, 3][row as usize % 3], [1, 3, 0][row as usize % 3]].into_iter().enumerate() {
                    rows[expert].0.push(row);
                    rows[expert].1.push(2 * row + k as u32);
                }
            }
            let groups: Vec<_> = rows
                .iter()
                .enumerate()
                .filter(|(_, (rows, _))| !rows.is_empty())
                .map(|(e, (rows, out_rows))| ExpertGroup { expert: e as u32, rows, out_rows })
                .collect();
            for level in Simd::available() {
                let mut out = vec![f32::NAN; 2 * n * width];
                let rows = Rows::Experts { width, groups: &groups };
                // Another product beside it, with other activations.
                let (other, beside) = (random.matrix(TensorType::Q8_0, 21, 64), random.activations(2, 64));
                let mut second = vec![f32::NAN; 2 * 21];
                let products = &mut [
                    Product { w: &w, x: &x, rows, out: &mut out },
                    Product { w: &other, x: &beside, rows: Rows::All, out: &mut second },
                ];
                multiply_with(level, &Pool::new(3), products);
                assert_eq!(bits(&second), bits(&scalar_result(&other, &beside)));
                let all = scalar_result(&w, &x);
                for group in &groups {
                    for (&row, &out_row) in group.rows.iter().zip(group.out_rows) {
                        let expected = &all[row as usize * experts * width + group.expert as usize * width..][..width];
                        assert_eq!(bits(&out[out_row as usize * width..][..width]), bits(expected), "{level:?} {ty}");
                    }
                }
            }
        }
    }
}

#[test]
fn activations_can_be_set_again_with_another_shape() {
    let mut random = Random(7);
    let (a, b) = (random.matrix(TensorType::Q4_K, 20, 512), random.matrix(TensorType::Q8_0, 20, 96));
    let mut x = random.activations(5, 512);
    scalar_result(&a, &x);
    let values = random.floats(2 * 96);
    x.set(&values, 2, 96);
    let mut fresh = Activations::new();
    fresh.set(&values, 2, 96);
    assert_eq!(bits(&scalar_result(&b, &x)), bits(&scalar_result(&b, &fresh)));
}

#[test]
#[should_panic(expected = "output row 3 is named twice")]
fn an_output_row_named_twice_is_refused() {
    let mut random = Random(8);
    let w = random.matrix(TensorType::Q8_0, 32, 32);
    let x = random.activations(2, 32);
    let groups =
        [ExpertGroup { expert: 0, rows: &[0], out_rows: &[3] }, ExpertGroup { expert: 1, rows: &[1], out_rows: &[3] }];
    let rows = Rows::Experts { width: 16, groups: &groups };
    multiply(&Pool::new(1), &mut [Product { w: &w, x: &x, rows, out: &mut [0.0; 64] }]);
}
