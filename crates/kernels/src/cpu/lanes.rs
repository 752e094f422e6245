//! Sixteen f32 lanes on every instruction set, and the functions all f32 ops are built from.
//!
//! A kernel is written once over [`Lanes`] and run by [`dispatch`] on the level asked for. Every lane operation is an IEEE
//! operation with one rounding (products and sums that are fused are fused on all levels), lane counts and the order of
//! sums over lanes are fixed, so all levels give the same bits. [`ScalarLanes`] is the readable reference.

use super::Simd;

/// Lanes of a vector on every level.
pub(crate) const LANES: usize = 16;

/// Operations on sixteen f32 lanes. A value of the type proves that the machine has the instructions.
pub(crate) trait Lanes: Copy {
    /// Sixteen lanes.
    type V: Copy;
    /// Vectors worth keeping in registers side by side: true with 32 registers of 16 lanes.
    const MANY_REGISTERS: bool;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, x: &[f32; LANES]) -> Self::V;
    fn store(self, x: Self::V, out: &mut [f32; LANES]);
    /// Half precision to single; infinities and NaNs come out as large finite values.
    fn load_f16(self, x: &[u16; LANES]) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c` with one rounding.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a` where `a > b`, else `b`.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a` where `a < b`, else `b`.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` with the low bits of `t` added to its exponent.
    fn add_exponent(self, x: Self::V, t: Self::V) -> Self::V;

    /// The first lanes of a short slice, the others zero.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::V {
        let mut padded = [0.0; LANES];
        padded[..x.len()].copy_from_slice(x);
        self.load(&padded)
    }

    /// The first lanes to a short slice.
    #[inline(always)]
    fn store_part(self, x: Self::V, out: &mut [f32]) {
        let mut padded = [0.0; LANES];
        self.store(x, &mut padded);
        out.copy_from_slice(&padded[..out.len()]);
    }

    /// Sum of the lanes: halves are added until one is left.
    #[inline(always)]
    fn sum(self, x: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        fold_lanes(lanes, |a, b| a + b)
    }

    /// Largest lane.
    #[inline(always)]
    fn largest(self, x: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        fold_lanes(lanes, |a, b| if a > b { a } else { b })
    }

    /// `e^x` within 2 units in the last place, for `x` clamped to -86 ..= 88.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        let x = self.min(self.max(x, self.splat(EXP_LOWEST)), self.splat(EXP_HIGHEST));
        // Adding and taking away 1.5 * 2^23 rounds to a whole number, which the sum also holds in its low bits.
        let shifted = self.fma(x, self.splat(std::f32::consts::LOG2_E), self.splat(ROUND_SHIFT));
        let n = self.sub(shifted, self.splat(ROUND_SHIFT));
        let r = self.fma(n, self.splat(-LN2_HIGH), x);
        let r = self.fma(n, self.splat(-LN2_LOW), r);
        let mut poly = self.splat(EXP_COEFFICIENTS[0]);
        for &coefficient in &EXP_COEFFICIENTS[1..] {
            poly = self.fma(poly, r, self.splat(coefficient));
        }
        let tail = self.fma(poly, self.mul(r, r), r);
        self.add_exponent(self.add(tail, self.splat(1.0)), shifted)
    }

    /// `1 / (1 + e^-x)`
    #[inline(always)]
    fn sigmoid(self, x: Self::V) -> Self::V {
        let one = self.splat(1.0);
        let e = self.exp(self.sub(self.splat(0.0), x));
        self.div(one, self.add(one, e))
    }

    /// `x * sigmoid(x)`
    #[inline(always)]
    fn silu(self, x: Self::V) -> Self::V {
        let e = self.exp(self.sub(self.splat(0.0), x));
        self.div(x, self.add(self.splat(1.0), e))
    }
}

/// Below this `e^x` would leave the normal numbers.
const EXP_LOWEST: f32 = -86.0;
/// Above this `e^x` would overflow.
const EXP_HIGHEST: f32 = 88.0;
const ROUND_SHIFT: f32 = 12_582_912.0;
/// ln 2 cut to 12 bits, so that `n * LN2_HIGH` is exact, and the rest.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Polynomial of `(e^r - 1 - r) / r^2` for `|r| <= ln 2 / 2`, highest power first (Cephes `expf`).
const EXP_COEFFICIENTS: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

#[inline(always)]
fn fold_lanes(mut lanes: [f32; LANES], op: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = op(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Half precision to single by moving the fields: exact for every finite value.
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

/// The reference: lane by lane.
#[derive(Clone, Copy)]
pub(crate) struct ScalarLanes;

impl Lanes for ScalarLanes {
    type V = [f32; LANES];
    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        *x
    }
    #[inline(always)]
    fn store(self, x: Self::V, out: &mut [f32; LANES]) {
        *out = x;
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::V {
        x.map(f16_to_f32)
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|lane| a[lane] + b[lane])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|lane| a[lane] - b[lane])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|lane| a[lane] / b[lane])
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|lane| if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|lane| if a[lane] < b[lane] { a[lane] } else { b[lane] })
    }
    #[inline(always)]
    fn add_exponent(self, x: Self::V, t: Self::V) -> Self::V {
        std::array::from_fn(|lane| f32::from_bits(x[lane].to_bits().wrapping_add(t[lane].to_bits() << 23)))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Lanes};
    use std::arch::x86_64::*;

    /// Two vectors of eight lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2Lanes(());

    impl Avx2Lanes {
        /// # Safety
        /// The machine has AVX2, FMA and F16C.
        #[inline(always)]
        pub(super) unsafe fn new() -> Self {
            Avx2Lanes(())
        }
    }

    /// One vector of sixteen lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512Lanes(());

    impl Avx512Lanes {
        /// # Safety
        /// The machine has AVX-512 F.
        #[inline(always)]
        pub(super) unsafe fn new() -> Self {
            Avx512Lanes(())
        }
    }

    // SAFETY of every block below: the value proves the instructions exist (`new`), and array references are readable and
    // writable over their whole length by unaligned loads and stores.

    macro_rules! pairs {
        ($name:ident, $op:ident) => {
            #[inline(always)]
            fn $name(self, a: Self::V, b: Self::V) -> Self::V {
                // SAFETY: see above.
                unsafe { [$op(a[0], b[0]), $op(a[1], b[1])] }
            }
        };
    }

    impl Lanes for Avx2Lanes {
        type V = [__m256; 2];
        const MANY_REGISTERS: bool = false;

        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            // SAFETY: see above.
            unsafe { [_mm256_set1_ps(x); 2] }
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> Self::V {
            // SAFETY: see above.
            unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
        }
        #[inline(always)]
        fn store(self, x: Self::V, out: &mut [f32; LANES]) {
            // SAFETY: see above.
            unsafe {
                _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
                _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
            }
        }
        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> Self::V {
            // SAFETY: see above.
            unsafe {
                let start: *const __m128i = x.as_ptr().cast();
                [_mm256_cvtph_ps(_mm_loadu_si128(start)), _mm256_cvtph_ps(_mm_loadu_si128(start.add(1)))]
            }
        }
        pairs!(add, _mm256_add_ps);
        pairs!(sub, _mm256_sub_ps);
        pairs!(mul, _mm256_mul_ps);
        pairs!(div, _mm256_div_ps);
        pairs!(max, _mm256_max_ps);
        pairs!(min, _mm256_min_ps);
        #[inline(always)]
        fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            // SAFETY: see above.
            unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
        }
        #[inline(always)]
        fn add_exponent(self, x: Self::V, t: Self::V) -> Self::V {
            // SAFETY: see above.
            unsafe {
                let low = _mm256_slli_epi32(_mm256_castps_si256(t[0]), 23);
                let high = _mm256_slli_epi32(_mm256_castps_si256(t[1]), 23);
                [
                    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x[0]), low)),
                    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x[1]), high)),
                ]
            }
        }
    }

    macro_rules! singles {
        ($name:ident, $op:ident) => {
            #[inline(always)]
            fn $name(self, a: Self::V, b: Self::V) -> Self::V {
                // SAFETY: see above.
                unsafe { $op(a, b) }
            }
        };
    }

    impl Lanes for Avx512Lanes {
        type V = __m512;
        const MANY_REGISTERS: bool = true;

        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            // SAFETY: see above.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> Self::V {
            // SAFETY: see above.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn store(self, x: Self::V, out: &mut [f32; LANES]) {
            // SAFETY: see above.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) }
        }
        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> Self::V {
            // SAFETY: see above.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
        }
        singles!(add, _mm512_add_ps);
        singles!(sub, _mm512_sub_ps);
        singles!(mul, _mm512_mul_ps);
        singles!(div, _mm512_div_ps);
        singles!(max, _mm512_max_ps);
        singles!(min, _mm512_min_ps);
        #[inline(always)]
        fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            // SAFETY: see above.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn add_exponent(self, x: Self::V, t: Self::V) -> Self::V {
            // SAFETY: see above.
            unsafe {
                let exponent = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
                _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), exponent))
            }
        }
    }
}

/// A computation written once for all levels. Mark `run` `#[inline(always)]`, with everything it calls over `Lanes`, and use
/// no lanes inside closures: neither would be compiled for the level's instructions.
pub(crate) trait Kernel {
    type Output;
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Runs a kernel on a level. A level the machine lacks falls back to the best one it has.
#[inline]
pub(crate) fn dispatch<K: Kernel>(simd: Simd, kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<K: Kernel>(kernel: K) -> K::Output {
            // SAFETY: this function has the features.
            kernel.run(unsafe { x86::Avx2Lanes::new() })
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
        fn avx512<K: Kernel>(kernel: K) -> K::Output {
            // SAFETY: this function has the features.
            kernel.run(unsafe { x86::Avx512Lanes::new() })
        }
        match simd {
            // SAFETY: `Simd` values above `Scalar` are only made where the machine has their features.
            Simd::Avx512 => return unsafe { avx512(kernel) },
            // SAFETY: as above.
            Simd::Avx2 => return unsafe { avx2(kernel) },
            Simd::Scalar => {}
        }
    }
    let _ = simd;
    kernel.run(ScalarLanes)
}

/// Splits a slice into whole vectors and a rest.
#[inline(always)]
pub(crate) fn vectors<T>(x: &[T]) -> (&[[T; LANES]], &[T]) {
    x.as_chunks::<LANES>()
}

/// Splits a slice into whole vectors and a rest.
#[inline(always)]
pub(crate) fn vectors_mut<T>(x: &mut [T]) -> (&mut [[T; LANES]], &mut [T]) {
    x.as_chunks_mut::<LANES>()
}

/// `e^x` of one value, with the bits of [`Lanes::exp`].
#[inline(always)]
pub(crate) fn exp<L: Lanes>(lanes: L, x: f32) -> f32 {
    let mut out = [0.0; LANES];
    lanes.store(lanes.exp(lanes.splat(x)), &mut out);
    out[0]
}
