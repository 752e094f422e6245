//! Blocks to f32, exactly as ggml and gguf-py compute them (one rounding per product, in the same order).

use super::blocks::{BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0, SUPERBLOCK, unpack_scales};
use super::{FormatError, TensorType};
use half::{bf16, f16};

/// Writes the weights stored in `src` to `dst`, one f32 per weight.
///
/// # Errors
/// When the type is not [`TensorType::computable`], or `src` is not exactly the bytes of `dst.len()` weights.
pub fn dequantize(ty: TensorType, src: &[u8], dst: &mut [f32]) -> Result<(), FormatError> {
    if !ty.computable() {
        return Err(FormatError::NotComputable(ty));
    }
    let expected = ty.row_bytes(dst.len()).ok_or(FormatError::NotWholeBlocks { ty, found: dst.len() })?;
    if expected != src.len() {
        return Err(FormatError::Length { ty, weights: dst.len(), expected, found: src.len() });
    }
    match ty {
        TensorType::F32 => {
            for (out, bytes) in dst.iter_mut().zip(src.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        TensorType::F16 => {
            for (out, bytes) in dst.iter_mut().zip(src.as_chunks::<2>().0) {
                *out = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        TensorType::BF16 => {
            for (out, bytes) in dst.iter_mut().zip(src.as_chunks::<2>().0) {
                *out = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        TensorType::Q8_0 => each_block::<BlockQ8_0, 32>(src, dst, |block, out| {
            let d = block.d.to_f32();
            for (o, &q) in out.iter_mut().zip(&block.qs) {
                *o = f32::from(q) * d;
            }
        }),
        TensorType::Q4_K => each_block::<BlockQ4K, SUPERBLOCK>(src, dst, |block, out| {
            let (d, dmin) = (block.d.to_f32(), block.dmin.to_f32());
            let (scales, mins) = unpack_scales(&block.scales);
            for s in 0..8 {
                let (scale, min) = (d * f32::from(scales[s]), dmin * f32::from(mins[s]));
                for i in 0..32 {
                    let q = (block.qs[32 * (s / 2) + i] >> (4 * (s % 2))) & 15;
                    out[32 * s + i] = scale * f32::from(q) - min;
                }
            }
        }),
        TensorType::Q5_K => each_block::<BlockQ5K, SUPERBLOCK>(src, dst, |block, out| {
            let (d, dmin) = (block.d.to_f32(), block.dmin.to_f32());
            let (scales, mins) = unpack_scales(&block.scales);
            for s in 0..8 {
                let (scale, min) = (d * f32::from(scales[s]), dmin * f32::from(mins[s]));
                for i in 0..32 {
                    let low = (block.qs[32 * (s / 2) + i] >> (4 * (s % 2))) & 15;
                    let q = low | (((block.qh[i] >> s) & 1) << 4);
                    out[32 * s + i] = scale * f32::from(q) - min;
                }
            }
        }),
        TensorType::Q6_K => each_block::<BlockQ6K, SUPERBLOCK>(src, dst, |block, out| {
            let d = block.d.to_f32();
            for half in 0..2 {
                for j in 0..4 {
                    for i in 0..32 {
                        let low = (block.ql[64 * half + 32 * (j % 2) + i] >> (4 * (j / 2))) & 15;
                        let high = (block.qh[32 * half + i] >> (2 * j)) & 3;
                        let q = (low | (high << 4)) as i8 - 32;
                        let index = 128 * half + 32 * j + i;
                        out[index] = d * f32::from(block.scales[index / 16]) * f32::from(q);
                    }
                }
            }
        }),
        _ => return Err(FormatError::NotComputable(ty)),
    }
    Ok(())
}

/// Runs `f` on every block and the `N` weights it stands for. The lengths were checked by the caller.
fn each_block<B: bytemuck::Pod, const N: usize>(src: &[u8], dst: &mut [f32], f: impl Fn(&B, &mut [f32; N])) {
    for (block, out) in bytemuck::cast_slice::<u8, B>(src).iter().zip(dst.as_chunks_mut::<N>().0) {
        f(block, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a linear congruential generator, the same as in the golden's script.
    fn noise(n: usize) -> Vec<u8> {
        let mut state = 12345u32;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                (state >> 24) as u8
            })
            .collect()
    }

    /// FNV-1a over the bits of the weights: a one-bit difference anywhere changes it.
    fn hash(values: &[f32]) -> u64 {
        values
            .iter()
            .flat_map(|v| v.to_bits().to_le_bytes())
            .fold(0xcbf29ce484222325, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x100000001b3))
    }

    /// Rows `type blocks hash first-weights(bits)` written by gguf-py, see `scripts/goldens/dequantize.py`.
    #[test]
    fn bits_equal_gguf_py() {
        let golden = include_str!("golden/dequantize.txt");
        let mut seen = 0;
        for line in golden.lines().filter(|line| !line.starts_with('#')) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let ty = TensorType::from_name(fields[0]).unwrap();
            let blocks: usize = fields[1].parse().unwrap();
            let mut src = noise(blocks * ty.block_bytes());
            // Scales that are infinite or NaN have no one right answer: clear the top exponent bit of the halves.
            let halves: &[usize] = match ty {
                TensorType::F16 | TensorType::BF16 | TensorType::Q8_0 => &[1],
                TensorType::F32 => &[3],
                TensorType::Q4_K | TensorType::Q5_K => &[1, 3],
                _ => &[209],
            };
            for block in src.chunks_mut(ty.block_bytes()) {
                halves.iter().for_each(|&at| block[at] &= 0xbf);
            }
            let mut dst = vec![0.0; blocks * ty.block_size()];
            dequantize(ty, &src, &mut dst).unwrap();
            for (i, bits) in fields[3..].iter().enumerate() {
                assert_eq!(format!("{:08x}", dst[i].to_bits()), *bits, "{ty} weight {i}");
            }
            assert_eq!(format!("{:016x}", hash(&dst)), fields[2], "{ty}");
            seen += 1;
        }
        assert_eq!(seen, TensorType::all().filter(|ty| ty.computable()).count());
    }

    #[test]
    fn buffers_that_do_not_belong_together_are_refused() {
        let mut dst = [0.0; 256];
        assert_eq!(
            dequantize(TensorType::Q4_K, &[0; 143], &mut dst).unwrap_err().to_string(),
            "256 weights of Q4_K take 144 bytes, found 143"
        );
        assert!(matches!(
            dequantize(TensorType::Q4_K, &[0; 144], &mut dst[..255]),
            Err(FormatError::NotWholeBlocks { .. })
        ));
        assert!(matches!(dequantize(TensorType::IQ2_S, &[], &mut []), Err(FormatError::NotComputable(_))));
    }
}
