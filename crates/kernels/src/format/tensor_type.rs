//! The ggml tensor types: number in a GGUF file, name, weights and bytes per block.

/// A ggml tensor type. Every type current ggml knows is here by name and size, also those strata cannot compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, non_camel_case_types)]
pub enum TensorType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
}

use TensorType::*;

/// (type, ggml number, name, weights per block, bytes per block), from ggml's `ggml.h` and `ggml-common.h` (b11434).
/// Numbers 4, 5, 31..=33 and 36..=38 belonged to types that were removed.
const TABLE: &[(TensorType, u32, &str, usize, usize)] = &[
    (F32, 0, "F32", 1, 4),
    (F16, 1, "F16", 1, 2),
    (Q4_0, 2, "Q4_0", 32, 18),
    (Q4_1, 3, "Q4_1", 32, 20),
    (Q5_0, 6, "Q5_0", 32, 22),
    (Q5_1, 7, "Q5_1", 32, 24),
    (Q8_0, 8, "Q8_0", 32, 34),
    // ggml's block is two f16 and 32 bytes; gguf-py lists 40 from a time when the two were f32.
    (Q8_1, 9, "Q8_1", 32, 36),
    (Q2_K, 10, "Q2_K", 256, 84),
    (Q3_K, 11, "Q3_K", 256, 110),
    (Q4_K, 12, "Q4_K", 256, 144),
    (Q5_K, 13, "Q5_K", 256, 176),
    (Q6_K, 14, "Q6_K", 256, 210),
    (Q8_K, 15, "Q8_K", 256, 292),
    (IQ2_XXS, 16, "IQ2_XXS", 256, 66),
    (IQ2_XS, 17, "IQ2_XS", 256, 74),
    (IQ3_XXS, 18, "IQ3_XXS", 256, 98),
    (IQ1_S, 19, "IQ1_S", 256, 50),
    (IQ4_NL, 20, "IQ4_NL", 32, 18),
    (IQ3_S, 21, "IQ3_S", 256, 110),
    (IQ2_S, 22, "IQ2_S", 256, 82),
    (IQ4_XS, 23, "IQ4_XS", 256, 136),
    (I8, 24, "I8", 1, 1),
    (I16, 25, "I16", 1, 2),
    (I32, 26, "I32", 1, 4),
    (I64, 27, "I64", 1, 8),
    (F64, 28, "F64", 1, 8),
    (IQ1_M, 29, "IQ1_M", 256, 56),
    (BF16, 30, "BF16", 1, 2),
    (TQ1_0, 34, "TQ1_0", 256, 54),
    (TQ2_0, 35, "TQ2_0", 256, 66),
    (MXFP4, 39, "MXFP4", 32, 17),
    (NVFP4, 40, "NVFP4", 64, 36),
    (Q1_0, 41, "Q1_0", 128, 18),
    (Q2_0, 42, "Q2_0", 64, 18),
];

impl TensorType {
    /// Every known type, in the order of ggml's numbers.
    pub fn all() -> impl Iterator<Item = TensorType> {
        TABLE.iter().map(|row| row.0)
    }

    fn entry(self) -> &'static (TensorType, u32, &'static str, usize, usize) {
        // The table holds every variant (tested), so the first row is never a wrong answer.
        TABLE.iter().find(|row| row.0 == self).unwrap_or(&TABLE[0])
    }

    /// The type with this number in a GGUF file; `None` for numbers ggml removed or has not defined.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.1 == id).map(|row| row.0)
    }

    /// The number of the type in a GGUF file.
    pub fn ggml_id(self) -> u32 {
        self.entry().1
    }

    /// The name people know, e.g. `Q4_K`.
    pub fn name(self) -> &'static str {
        self.entry().2
    }

    /// The type of this name, upper or lower case.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.2.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    /// Weights per block (1 for plain numbers).
    pub fn block_size(self) -> usize {
        self.entry().3
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        self.entry().4
    }

    /// Bytes of a row of `cols` weights; `None` when `cols` is not a multiple of the block size or the size overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let entry = self.entry();
        cols.is_multiple_of(entry.3).then(|| (cols / entry.3).checked_mul(entry.4)).flatten()
    }

    /// Whether strata can dequantize and multiply with this type.
    pub fn computable(self) -> bool {
        matches!(self, F32 | F16 | BF16 | Q8_0 | Q4_K | Q5_K | Q6_K)
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_in_the_table_once_and_found_by_number_and_name() {
        // Q2_0 is the last variant of the enum: the table must hold as many rows as there are variants.
        assert_eq!(TABLE.len(), Q2_0 as usize + 1);
        for ty in TensorType::all() {
            assert_eq!(ty.entry().0, ty);
            assert_eq!(TensorType::from_ggml_id(ty.ggml_id()), Some(ty));
            assert_eq!(TensorType::from_name(&ty.name().to_lowercase()), Some(ty));
            assert_eq!(TABLE.iter().filter(|row| row.1 == ty.ggml_id() || row.2 == ty.name()).count(), 1);
            assert_eq!(format!("{ty:?}"), ty.name());
        }
    }

    #[test]
    fn numbers_that_ggml_removed_or_never_gave_are_unknown() {
        for id in [4, 5, 31, 32, 33, 36, 37, 38, 43, 1000, u32::MAX] {
            assert_eq!(TensorType::from_ggml_id(id), None, "{id}");
        }
        assert_eq!(TensorType::from_name("Q4_K_M"), None);
    }

    #[test]
    fn row_bytes_refuses_partial_blocks_and_overflow() {
        assert_eq!(Q4_K.row_bytes(2048), Some(8 * 144));
        assert_eq!(Q4_K.row_bytes(0), Some(0));
        assert_eq!(Q4_K.row_bytes(128), None);
        assert_eq!(F64.row_bytes(usize::MAX), None);
        assert_eq!(Q8_0.row_bytes(usize::MAX & !31), None);
    }
}
