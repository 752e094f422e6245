//! Byte layout of the block formats strata computes with.
//!
//! Every struct has alignment 1 (halves are kept as two bytes), so a row of a memory map is viewed as blocks wherever it
//! starts.

use half::f16;

/// Weights in a superblock of the K formats.
pub const SUPERBLOCK: usize = 256;
/// Weights in a block of `Q8_0`.
pub const BLOCK: usize = 32;

/// An f16 as it lies in a file: two bytes, little endian, any alignment.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Half(pub [u8; 2]);

impl Half {
    /// The value, exactly.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        f16::from_le_bytes(self.0).to_f32()
    }

    /// The nearest half (ties to even).
    #[inline(always)]
    pub fn from_f32(value: f32) -> Self {
        Half(f16::from_f32(value).to_le_bytes())
    }

    /// The bits.
    #[inline(always)]
    pub fn bits(self) -> u16 {
        u16::from_le_bytes(self.0)
    }
}

/// `Q8_0`: 32 weights `d * qs[i]`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct BlockQ8_0 {
    /// Scale.
    pub d: Half,
    /// Weights.
    pub qs: [i8; 32],
}
const _: () = assert!(size_of::<BlockQ8_0>() == 34 && align_of::<BlockQ8_0>() == 1);

/// `Q4_K`: 8 sub-blocks of 32 weights `d * sc * q - dmin * m`, q in 0..16.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct BlockQ4K {
    /// Scale of the sub-block scales.
    pub d: Half,
    /// Scale of the sub-block minima.
    pub dmin: Half,
    /// 8 scales and 8 minima of 6 bits, see [`unpack_scales`].
    pub scales: [u8; 12],
    /// Byte `32*p + i` holds weight i of sub-block `2p` (low nibble) and of sub-block `2p+1` (high nibble).
    pub qs: [u8; 128],
}
const _: () = assert!(size_of::<BlockQ4K>() == 144 && align_of::<BlockQ4K>() == 1);

/// `Q5_K`: as `Q4_K` with a fifth bit.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct BlockQ5K {
    /// Scale of the sub-block scales.
    pub d: Half,
    /// Scale of the sub-block minima.
    pub dmin: Half,
    /// 8 scales and 8 minima of 6 bits, see [`unpack_scales`].
    pub scales: [u8; 12],
    /// Bit `s` of byte `i` is the fifth bit of weight i of sub-block s.
    pub qh: [u8; 32],
    /// Low four bits, laid out as in `Q4_K`.
    pub qs: [u8; 128],
}
const _: () = assert!(size_of::<BlockQ5K>() == 176 && align_of::<BlockQ5K>() == 1);

/// `Q6_K`: 16 sub-blocks of 16 weights `d * scales[s] * (q - 32)`, q in 0..64.
///
/// The superblock is two halves of 128 weights; in a half, weight `32*j + i` (j in 0..4, i in 0..32) has its low four
/// bits in `ql[64*half + 32*(j % 2) + i]` (low nibble for j < 2) and its high two bits at `2*j` of `qh[32*half + i]`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct BlockQ6K {
    /// Low four bits.
    pub ql: [u8; 128],
    /// High two bits.
    pub qh: [u8; 64],
    /// Sub-block scales.
    pub scales: [i8; 16],
    /// Scale of the sub-block scales.
    pub d: Half,
}
const _: () = assert!(size_of::<BlockQ6K>() == 210 && align_of::<BlockQ6K>() == 1);

/// The 8 scales and 8 minima (each 0..64) of a `Q4_K` or `Q5_K` superblock.
///
/// Bytes 0..4 hold scales 0..4, bytes 4..8 minima 0..4 (low six bits); bytes 8..12 hold the low four bits of scales
/// 4..8 (low nibble) and minima 4..8 (high nibble), whose top two bits are the top two bits of the first eight bytes.
#[inline(always)]
pub fn unpack_scales(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let word = |i: usize| u32::from_le_bytes([packed[i], packed[i + 1], packed[i + 2], packed[i + 3]]);
    let (a, b, c) = (word(0), word(4), word(8));
    let low = |x: u32| u64::from(x & 0x3f3f_3f3f);
    let high = |nibbles: u32, top: u32| u64::from((nibbles & 0x0f0f_0f0f) | ((top >> 2) & 0x3030_3030)) << 32;
    ((low(a) | high(c, a)).to_le_bytes(), (low(b) | high(c >> 4, b)).to_le_bytes())
}
