//! Which instruction set the CPU kernels use: found out once, overridable for tests and benchmarks.

use std::sync::OnceLock;

/// Instruction sets with kernels of their own, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Simd {
    /// The readable reference; the only one on machines that are not x86-64.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
}

impl Simd {
    /// The best level this machine has.
    pub fn detect() -> Simd {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vnni");
            if avx2 && avx512 {
                return Simd::Avx512;
            }
            if avx2 {
                return Simd::Avx2;
            }
        }
        Simd::Scalar
    }

    /// The level all kernels use: the best one, or a lower one named by `STRATA_SIMD` (`scalar`, `avx2`, `avx512`).
    /// Read once per process. A level the machine lacks is never taken.
    pub fn current() -> Simd {
        static CURRENT: OnceLock<Simd> = OnceLock::new();
        *CURRENT.get_or_init(|| {
            let best = Simd::detect();
            let asked = match std::env::var("STRATA_SIMD").as_deref() {
                Ok("scalar") => Simd::Scalar,
                Ok("avx2") => Simd::Avx2,
                _ => best,
            };
            asked.min(best)
        })
    }

    /// Every level this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Simd> {
        let best = Simd::detect();
        [Simd::Scalar, Simd::Avx2, Simd::Avx512].into_iter().filter(move |&level| level <= best)
    }
}
