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

    /// The level all kernels use: the best one, or a lower one named by `STRATA_SIMD` (see [`Simd::from_env`]).
    /// Read once per process. A level the machine lacks is never taken.
    pub fn current() -> Simd {
        static CURRENT: OnceLock<Simd> = OnceLock::new();
        *CURRENT.get_or_init(|| Simd::from_env().unwrap_or_else(|_| Simd::detect()))
    }

    /// The level named by `STRATA_SIMD` (`scalar`, `avx2`, `avx512`), or the best one where the variable is not set.
    ///
    /// # Errors
    /// A name that is none of these, or a level this machine lacks: a sentence with the choices.
    pub fn from_env() -> Result<Simd, String> {
        match std::env::var_os("STRATA_SIMD") {
            None => Ok(Simd::detect()),
            Some(name) => Simd::named(&name.to_string_lossy()),
        }
    }

    fn named(name: &str) -> Result<Simd, String> {
        let found = Simd::available().find(|level| level.name() == name);
        found.ok_or_else(|| {
            let choices: Vec<_> = Simd::available().map(Simd::name).collect();
            format!("STRATA_SIMD is {name:?}, expected one of those this machine has: {}", choices.join(", "))
        })
    }

    /// Its name in `STRATA_SIMD`.
    fn name(self) -> &'static str {
        match self {
            Simd::Scalar => "scalar",
            Simd::Avx2 => "avx2",
            Simd::Avx512 => "avx512",
        }
    }

    /// Every level this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Simd> {
        let best = Simd::detect();
        [Simd::Scalar, Simd::Avx2, Simd::Avx512].into_iter().filter(move |&level| level <= best)
    }
}
