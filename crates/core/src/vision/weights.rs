//! The encoder's file: geometry and tensors, checked against each other.

use super::VisionError;
use super::preprocess::PictureGeometry;
use crate::gguf::{GgufError, GgufFile, TensorInfo};
use sha2::{Digest, Sha256};
use strata_kernels::Matrix;
use strata_kernels::cpu::dense::Linear;
use strata_kernels::format::{TensorType, dequantize};

/// The sizes of an encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderShape {
    /// Pixels, patches and colours.
    pub picture: PictureGeometry,
    /// Width of a patch's row inside the encoder.
    pub hidden: usize,
    /// Width inside a block's MLP.
    pub feed_forward: usize,
    /// Blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Side of the square table of learned positions.
    pub position_side: usize,
    /// Width of the rows it makes.
    pub out: usize,
    /// Added to the variance in every LayerNorm.
    pub eps: f32,
}

impl EncoderShape {
    /// Width of an attention head.
    pub fn head(&self) -> usize {
        self.hidden / self.heads
    }

    /// Patches in a merged block.
    pub fn merged(&self) -> usize {
        self.picture.merge * self.picture.merge
    }

    /// Values of a patch: three channels of `patch x patch` pixels.
    pub fn patch_values(&self) -> usize {
        3 * self.picture.patch * self.picture.patch
    }
}

/// Scale and shift of a LayerNorm.
pub struct Norm {
    /// `[hidden]`.
    pub weight: Vec<f32>,
    /// `[hidden]`.
    pub bias: Vec<f32>,
}

/// One transformer block.
pub struct Layer {
    /// Before attention.
    pub ln1: Norm,
    /// Before the MLP.
    pub ln2: Norm,
    /// `[3 * hidden, hidden]`: queries, keys, values.
    pub qkv: Linear,
    /// `[hidden, hidden]`.
    pub attn_out: Linear,
    /// `[feed_forward, hidden]`.
    pub ffn_up: Linear,
    /// `[hidden, feed_forward]`.
    pub ffn_down: Linear,
}

/// All tensors of an encoder.
pub struct EncoderWeights {
    /// `[hidden, 3 * patch * patch]`, F32: the sum of the two temporal kernels, since a still picture is shown to both.
    pub patch_embd: Linear,
    /// `[position_side * position_side, hidden]`.
    pub positions: Vec<f32>,
    /// The blocks.
    pub layers: Vec<Layer>,
    /// Before the merger.
    pub post_ln: Norm,
    /// `[merged * hidden, merged * hidden]`.
    pub merge_up: Linear,
    /// `[out, merged * hidden]`.
    pub merge_down: Linear,
}

/// The most of any size read from the file: far above any real encoder, low enough that products of sizes fit.
const MAX_SIZE: usize = 1 << 16;

impl From<GgufError> for VisionError {
    fn from(error: GgufError) -> Self {
        VisionError::Gguf(error)
    }
}

fn unsupported(file: &GgufFile, item: &str, expected: impl Into<String>, found: impl Into<String>) -> VisionError {
    VisionError::Unsupported {
        file: file.name().to_string(),
        item: item.to_string(),
        expected: expected.into(),
        found: found.into(),
    }
}

/// Reads geometry and tensors.
///
/// # Errors
/// When the file is not an encoder of this kind, or a key or tensor is missing or does not fit the others.
pub fn load(file: &GgufFile) -> Result<(EncoderShape, EncoderWeights), VisionError> {
    let meta = file.metadata();
    let architecture = meta.str("general.architecture")?;
    if architecture != "clip" {
        return Err(unsupported(file, "general.architecture", "clip (a vision encoder)", architecture));
    }
    let projector = match meta.str_opt("clip.projector_type")? {
        Some(projector) => projector,
        None => meta.str("clip.vision.projector_type")?,
    };
    if projector != "qwen3vl_merger" {
        return Err(unsupported(file, "clip.projector_type", "qwen3vl_merger", projector));
    }
    if let Some(deepstack) = meta.bool_array_opt("clip.vision.is_deepstack_layers")?
        && let Some(layer) = deepstack.iter().position(|&yes| yes)
    {
        let found = format!("true at layer {layer}");
        return Err(unsupported(file, "clip.vision.is_deepstack_layers", "no deepstack layers", found));
    }
    if meta.bool_opt("clip.use_silu")? == Some(true) || meta.bool_opt("clip.use_gelu")? == Some(false) {
        return Err(unsupported(file, "clip.use_gelu", "GELU in the blocks", "another activation"));
    }
    let size = |key: &str| -> Result<usize, VisionError> {
        let value = meta.u32(key)? as usize;
        if value == 0 || value > MAX_SIZE {
            return Err(unsupported(file, key, format!("1..={MAX_SIZE}"), value.to_string()));
        }
        Ok(value)
    };
    let channel = |key: &str, positive: bool| -> Result<[f32; 3], VisionError> {
        let values = meta.f32_array(key)?;
        let good = |v: &f32| v.is_finite() && (*v > 0.0 || !positive);
        match <[f32; 3]>::try_from(values.as_slice()) {
            Ok(values) if values.iter().all(good) => Ok(values),
            _ => Err(unsupported(file, key, "three finite numbers, above 0 for a deviation", format!("{values:?}"))),
        }
    };
    let merge_key = "clip.vision.spatial_merge_size";
    let picture = PictureGeometry {
        patch: size("clip.vision.patch_size")?,
        merge: if meta.get(merge_key).is_some() { size(merge_key)? } else { 2 },
        mean: channel("clip.vision.image_mean", false)?,
        std: channel("clip.vision.image_std", true)?,
    };
    if picture.patch > 256 || picture.merge > 16 {
        let found = format!("patches of {} pixels in blocks of {}", picture.patch, picture.merge);
        return Err(unsupported(file, "clip.vision.patch_size", "patches up to 256 pixels in blocks up to 16", found));
    }
    let positions = matrix_info(file, "v.position_embd.weight")?;
    let table = positions.rows() as usize;
    let mut shape = EncoderShape {
        picture,
        hidden: size("clip.vision.embedding_length")?,
        feed_forward: size("clip.vision.feed_forward_length")?,
        layers: size("clip.vision.block_count")?,
        heads: size("clip.vision.attention.head_count")?,
        position_side: table.isqrt(),
        out: size("clip.vision.projection_dim")?,
        eps: meta.f32("clip.vision.attention.layer_norm_epsilon")?,
    };
    if shape.position_side == 0 || shape.position_side * shape.position_side != table || table > MAX_SIZE * 64 {
        return Err(unsupported(file, "v.position_embd.weight", "a square number of rows", table.to_string()));
    }
    if !shape.hidden.is_multiple_of(shape.heads) || !shape.head().is_multiple_of(4) {
        let found = format!("{} heads for a width of {}", shape.heads, shape.hidden);
        let expected = "heads that divide the width into multiples of 4 (two axes of rotated pairs)";
        return Err(unsupported(file, "clip.vision.attention.head_count", expected, found));
    }
    if !shape.eps.is_finite() || shape.eps < 0.0 {
        let key = "clip.vision.attention.layer_norm_epsilon";
        return Err(unsupported(file, key, "a small number, 0 or above", shape.eps.to_string()));
    }
    shape.layers = shape.layers.min(MAX_SIZE);
    let weights = tensors(file, &shape)?;
    Ok((shape, weights))
}

fn tensors(file: &GgufFile, shape: &EncoderShape) -> Result<EncoderWeights, VisionError> {
    let (hidden, ff, merged) = (shape.hidden, shape.feed_forward, shape.merged() * shape.hidden);
    let norm = |name: &str| -> Result<Norm, VisionError> {
        Ok(Norm {
            weight: vector(file, &format!("{name}.weight"), hidden)?,
            bias: vector(file, &format!("{name}.bias"), hidden)?,
        })
    };
    let mut layers = Vec::new();
    for i in 0..shape.layers {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        layers.push(Layer {
            ln1: norm(&name("ln1"))?,
            ln2: norm(&name("ln2"))?,
            qkv: linear(file, &name("attn_qkv"), 3 * hidden, hidden)?,
            attn_out: linear(file, &name("attn_out"), hidden, hidden)?,
            ffn_up: linear(file, &name("ffn_up"), ff, hidden)?,
            ffn_down: linear(file, &name("ffn_down"), hidden, ff)?,
        });
    }
    Ok(EncoderWeights {
        patch_embd: patch_embedding(file, shape)?,
        positions: values(
            file,
            matrix_info(file, "v.position_embd.weight")?,
            &[hidden as u64, (shape.position_side * shape.position_side) as u64],
        )?,
        layers,
        post_ln: norm("v.post_ln")?,
        merge_up: linear(file, "mm.0", merged, merged)?,
        merge_down: linear(file, "mm.2", shape.out, merged)?,
    })
}

fn matrix_info<'a>(file: &'a GgufFile, name: &str) -> Result<&'a TensorInfo, VisionError> {
    file.tensor(name).ok_or_else(|| unsupported(file, name, "the tensor", "none of that name"))
}

/// A tensor's values as f32; its dimensions, lowest first and without trailing ones, must be `dims`.
fn values(file: &GgufFile, info: &TensorInfo, dims: &[u64]) -> Result<Vec<f32>, VisionError> {
    let trim = |dims: &[u64]| dims.iter().rposition(|&d| d != 1).map_or(0, |last| last + 1);
    if info.dims[..trim(&info.dims)] != dims[..trim(dims)] {
        return Err(unsupported(file, &info.name, format!("shape {dims:?}"), format!("{:?}", info.dims)));
    }
    if !matches!(info.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
        return Err(unsupported(file, &info.name, "F32, F16 or BF16", info.ty.name()));
    }
    let mut out = vec![0.0; dims.iter().product::<u64>() as usize];
    dequantize(info.ty, &file.data(info), &mut out)
        .map_err(|e| unsupported(file, &info.name, "readable weights", e.to_string()))?;
    Ok(out)
}

fn vector(file: &GgufFile, name: &str, len: usize) -> Result<Vec<f32>, VisionError> {
    values(file, matrix_info(file, name)?, &[len as u64])
}

fn linear(file: &GgufFile, name: &str, outputs: usize, inputs: usize) -> Result<Linear, VisionError> {
    let info = matrix_info(file, &format!("{name}.weight"))?;
    if info.dims != [inputs as u64, outputs as u64] {
        return Err(unsupported(file, &info.name, format!("shape [{inputs}, {outputs}]"), format!("{:?}", info.dims)));
    }
    if !matches!(info.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16 | TensorType::Q8_0) {
        return Err(unsupported(file, &info.name, "F32, F16, BF16 or Q8_0", info.ty.name()));
    }
    let weight = Matrix { ty: info.ty, rows: outputs, cols: inputs, data: file.data(info) };
    Ok(Linear { weight, bias: vector(file, &format!("{name}.bias"), outputs)? })
}

fn patch_embedding(file: &GgufFile, shape: &EncoderShape) -> Result<Linear, VisionError> {
    let patch = shape.picture.patch as u64;
    let dims = [patch, patch, 3, shape.hidden as u64];
    let mut kernel = values(file, matrix_info(file, "v.patch_embd.weight")?, &dims)?;
    let second = values(file, matrix_info(file, "v.patch_embd.weight.1")?, &dims)?;
    for (a, b) in kernel.iter_mut().zip(second) {
        *a += b;
    }
    let data = kernel.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into();
    let weight = Matrix { ty: TensorType::F32, rows: shape.hidden, cols: shape.patch_values(), data };
    Ok(Linear { weight, bias: vector(file, "v.patch_embd.bias", shape.hidden)? })
}

/// What tells this file's rows from another's: SHA-256 over every tensor's name, type, shape and first bytes. Not a check
/// of the file: see [`super::checksum`] for that.
pub fn identity(file: &GgufFile) -> [u8; 32] {
    const SAMPLE: usize = 16 << 10;
    let mut hash = Sha256::new();
    hash.update(b"strata vision encoder 1");
    for tensor in file.tensors() {
        hash.update(tensor.name.as_bytes());
        hash.update(tensor.ty.ggml_id().to_le_bytes());
        for dim in &tensor.dims {
            hash.update(dim.to_le_bytes());
        }
        let data = file.data(tensor);
        hash.update(&data[..data.len().min(SAMPLE)]);
    }
    for key in ["clip.vision.image_mean", "clip.vision.image_std", "clip.vision.attention.layer_norm_epsilon"] {
        if let Some(value) = file.metadata().get(key) {
            hash.update(format!("{value:?}").as_bytes());
        }
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden() -> Vec<u8> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny-mmproj.gguf");
        std::fs::read(path).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    fn opened(bytes: Vec<u8>) -> Result<EncoderShape, VisionError> {
        load(&GgufFile::from_bytes("test", bytes.into())?).map(|(shape, _)| shape)
    }

    /// The tiny encoder with the 4-byte value of `key` replaced.
    fn with_value(key: &str, value: [u8; 4]) -> Vec<u8> {
        let mut bytes = golden();
        let at = bytes.windows(key.len()).position(|w| w == key.as_bytes()).expect("the key is there") + key.len() + 4;
        bytes[at..at + 4].copy_from_slice(&value);
        bytes
    }

    /// The tiny encoder with the first `from` replaced by `to` of the same length.
    fn with_text(from: &str, to: &str) -> Vec<u8> {
        assert_eq!(from.len(), to.len());
        let mut bytes = golden();
        let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).expect("the text is there");
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        bytes
    }

    #[test]
    fn the_geometry_comes_from_the_file() {
        let shape = opened(golden()).unwrap();
        assert_eq!((shape.layers, shape.hidden, shape.feed_forward, shape.heads), (4, 128, 512, 4));
        assert_eq!((shape.picture.patch, shape.picture.merge, shape.position_side, shape.out), (16, 2, 16, 256));
    }

    #[test]
    fn a_file_that_does_not_fit_together_is_refused_by_name() {
        let u = |key: &str, value: u32| with_value(key, value.to_le_bytes());
        let cases = [
            (with_text("clip", "clop"), "general.architecture"),
            (u("clip.vision.block_count", 5), "v.blk.4"),
            (u("clip.vision.block_count", u32::MAX), "clip.vision.block_count"),
            (u("clip.vision.attention.head_count", 0), "head_count"),
            (u("clip.vision.attention.head_count", 5), "head_count"),
            (u("clip.vision.attention.head_count", 64), "head_count"),
            (u("clip.vision.embedding_length", 64), "ln1"),
            (u("clip.vision.feed_forward_length", 500), "ffn_up"),
            (u("clip.vision.patch_size", 14), "patch_embd"),
            (u("clip.vision.patch_size", 60_000), "patch_size"),
            (u("clip.vision.projection_dim", 255), "mm.2"),
            (u("clip.vision.spatial_merge_size", 3), "mm.0"),
            (with_value("clip.vision.attention.layer_norm_epsilon", f32::NAN.to_le_bytes()), "epsilon"),
            (with_text("qwen3vl_merger", "qwen2vl_merger"), "projector_type"),
            (with_text("v.post_ln.weight", "v.post_ln.weighs"), "v.post_ln.weight"),
            (with_text("v.position_embd.weight", "v.position_embd.weighs"), "v.position_embd.weight"),
            (with_text("clip.vision.image_std", "clip.vision.image_stt"), "clip.vision.image_std"),
        ];
        for (bytes, item) in cases {
            let error = opened(bytes).err().unwrap_or_else(|| panic!("{item}: was accepted")).to_string();
            assert!(error.contains(item), "{error:?} does not name {item}");
        }
    }

    #[test]
    fn identity_follows_the_weights() {
        let id = |bytes: Vec<u8>| identity(&GgufFile::from_bytes("test", bytes.into()).unwrap());
        assert_eq!(id(golden()), id(golden()));
        let file = GgufFile::from_bytes("test", golden().into()).unwrap();
        let tensor = file.tensor("v.blk.2.ffn_up.weight").unwrap();
        let weights = file.data(tensor);
        let mut changed = golden();
        let at = changed.windows(64).position(|w| w == &weights[..64]).unwrap();
        changed[at + 5] ^= 0x10;
        assert_ne!(id(golden()), id(changed));
    }
}
