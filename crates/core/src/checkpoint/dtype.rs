//! Element types of safetensors.

/// The type of a tensor's elements. All types of the format are known by name and size; which of them can be converted
/// is the converter's business.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)]
pub enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    F8_E5M2,
    F8_E4M3,
    F8_E8M0,
    F6_E2M3,
    F6_E3M2,
    F4,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    BOOL,
    C64,
}

impl Dtype {
    const ALL: [(Dtype, &'static str, usize); 20] = [
        (Dtype::F64, "F64", 64),
        (Dtype::F32, "F32", 32),
        (Dtype::F16, "F16", 16),
        (Dtype::BF16, "BF16", 16),
        (Dtype::F8_E5M2, "F8_E5M2", 8),
        (Dtype::F8_E4M3, "F8_E4M3", 8),
        (Dtype::F8_E8M0, "F8_E8M0", 8),
        (Dtype::F6_E2M3, "F6_E2M3", 6),
        (Dtype::F6_E3M2, "F6_E3M2", 6),
        (Dtype::F4, "F4", 4),
        (Dtype::I64, "I64", 64),
        (Dtype::I32, "I32", 32),
        (Dtype::I16, "I16", 16),
        (Dtype::I8, "I8", 8),
        (Dtype::U64, "U64", 64),
        (Dtype::U32, "U32", 32),
        (Dtype::U16, "U16", 16),
        (Dtype::U8, "U8", 8),
        (Dtype::BOOL, "BOOL", 8),
        (Dtype::C64, "C64", 64),
    ];

    /// The type with this name in a header.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|d| d.1 == name).map(|d| d.0)
    }

    /// The name as it stands in a header.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// Bits per element.
    pub fn bits(self) -> usize {
        Self::ALL[self as usize].2
    }
}
