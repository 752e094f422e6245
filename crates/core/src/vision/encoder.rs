//! The vision transformer: pixels to rows of the text model's width.

use super::preprocess::{PictureGeometry, PreprocessOptions, Preprocessed, preprocess};
use super::weights::{self, EncoderShape, EncoderWeights, Layer};
use super::{PictureRows, VisionError};
use crate::gguf::GgufFile;
use bytes::Bytes;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_kernels::cpu::dense::{Activation, AttentionShape, add_rows, attention, layer_norm, linear, rotate_pairs};
use strata_kernels::cpu::{Pool, Simd};

/// Base of the rotary frequencies.
const ROPE_BASE: f64 = 10_000.0;
/// Patches that go through an MLP together: bounds the widest buffer, and is enough to make up for unpacking the weights
/// again.
const MLP_ROWS: usize = 4096;

/// A vision encoder opened from a llama.cpp `mmproj` GGUF. Its weights are used in place.
pub struct VisionEncoder {
    shape: EncoderShape,
    weights: EncoderWeights,
    identity: [u8; 32],
    pool: Pool,
    name: String,
}

/// Where the time of one picture went.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncodeTimes {
    /// Patches, their embedding and positions.
    pub embed: Duration,
    /// The query, key, value and output products of all blocks, with their norms.
    pub projections: Duration,
    /// Attention itself, with the rotation.
    pub attention: Duration,
    /// The MLPs of all blocks, with their norms.
    pub mlp: Duration,
    /// The merger.
    pub merger: Duration,
}

impl VisionEncoder {
    /// Opens the encoder in `path`; `threads` work on each picture.
    ///
    /// # Errors
    /// When the file is no GGUF, no encoder of this kind, or does not fit together.
    pub fn open(path: &Path, threads: usize) -> Result<Self, VisionError> {
        Self::from_gguf(&GgufFile::open(path)?, threads)
    }

    /// Opens an encoder held in memory; `name` stands for it in errors.
    ///
    /// # Errors
    /// As [`VisionEncoder::open`].
    pub fn from_bytes(name: &str, data: Bytes, threads: usize) -> Result<Self, VisionError> {
        Self::from_gguf(&GgufFile::from_bytes(name, data)?, threads)
    }

    fn from_gguf(file: &GgufFile, threads: usize) -> Result<Self, VisionError> {
        let (shape, weights) = weights::load(file)?;
        let identity = weights::identity(file);
        Ok(Self { shape, weights, identity, pool: Pool::new(threads), name: file.name().to_string() })
    }

    /// The encoder's sizes.
    pub fn shape(&self) -> &EncoderShape {
        &self.shape
    }

    /// The pixels it wants.
    pub fn geometry(&self) -> &PictureGeometry {
        &self.shape.picture
    }

    /// Width of the rows it makes: must be the text model's hidden size.
    pub fn width(&self) -> usize {
        self.shape.out
    }

    /// Fewest rows a picture should become unless the user says otherwise: a ninth of what the table of positions was
    /// trained on, which for the real encoder (48 x 48 patches) is the 64 rows of its own preprocessor settings.
    pub fn default_min_tokens(&self) -> usize {
        (self.shape.position_side * self.shape.position_side / self.shape.merged() / 9).max(1)
    }

    /// What tells this encoder's rows from another's: part of every picture's key.
    pub fn identity(&self) -> &[u8; 32] {
        &self.identity
    }

    /// Checks that its rows fit a text model of `hidden` values per row.
    ///
    /// # Errors
    /// When they do not: the encoder belongs to another model.
    pub fn check_width(&self, hidden: usize) -> Result<(), VisionError> {
        if self.shape.out == hidden {
            return Ok(());
        }
        Err(VisionError::Unsupported {
            file: self.name.clone(),
            item: "clip.vision.projection_dim".into(),
            expected: format!("{hidden}, the hidden size of the text model"),
            found: self.shape.out.to_string(),
        })
    }

    /// Decodes and resizes a picture for this encoder.
    ///
    /// # Errors
    /// When the picture cannot be read (see [`preprocess`]).
    pub fn preprocess(&self, bytes: &[u8], options: &PreprocessOptions) -> Result<Preprocessed, VisionError> {
        preprocess(bytes, &self.shape.picture, options, &self.identity)
    }

    /// Runs the encoder.
    ///
    /// # Panics
    /// When `picture` was not made for an encoder of this geometry.
    pub fn encode(&self, picture: &Preprocessed) -> PictureRows {
        self.encode_timed(picture).0
    }

    /// Runs the encoder and says where the time went.
    ///
    /// # Panics
    /// When `picture` was not made for an encoder of this geometry.
    pub fn encode_timed(&self, picture: &Preprocessed) -> (PictureRows, EncodeTimes) {
        let factor = self.shape.picture.factor() as u32;
        assert!(
            picture.size == (picture.grid.1 * factor, picture.grid.0 * factor)
                && picture.rgb.len() == picture.size.0 as usize * picture.size.1 as usize * 3,
            "the picture was prepared for another encoder"
        );
        let mut times = EncodeTimes::default();
        let mut clock = Instant::now();
        let mut lap = |total: &mut Duration| {
            let now = Instant::now();
            *total += now - clock;
            clock = now;
        };
        let patches = PatchGrid::new(picture.grid, self.shape.picture.merge);
        let mut x = self.embed(picture, &patches);
        let (cos, sin) = self.rotation(&patches);
        lap(&mut times.embed);
        let hidden = self.shape.hidden;
        let mut work = Work::new(patches.len(), &self.shape);
        for layer in &self.weights.layers {
            self.norm(&x, &layer.ln1, &mut work.normed);
            self.linear(&layer.qkv, Activation::None, &work.normed, &mut work.qkv);
            lap(&mut times.projections);
            let half = self.shape.head() / 2;
            rotate_pairs(&self.pool, Simd::current(), &mut work.qkv, 3 * hidden, 2 * hidden, half, &cos, &sin);
            let shape = AttentionShape { rows: patches.len(), heads: self.shape.heads, head: self.shape.head() };
            attention(&self.pool, Simd::current(), shape, &work.qkv, &mut work.normed);
            lap(&mut times.attention);
            self.linear(&layer.attn_out, Activation::None, &work.normed, &mut work.added);
            add_rows(&self.pool, &mut x, &work.added);
            lap(&mut times.projections);
            self.mlp(layer, &mut x, &mut work);
            lap(&mut times.mlp);
        }
        self.norm(&x, &self.weights.post_ln, &mut work.normed);
        // A merged block's patches lie one after the other, so its row is a run of them.
        let merged = self.shape.merged() * hidden;
        let blocks = patches.len() / self.shape.merged();
        let mut inner = vec![0.0; blocks * merged];
        let mut out = vec![0.0; blocks * self.shape.out];
        self.linear(&self.weights.merge_up, Activation::GeluErf, &work.normed, &mut inner);
        self.linear(&self.weights.merge_down, Activation::None, &inner, &mut out);
        lap(&mut times.merger);
        let rows = PictureRows { key: picture.key, grid: picture.grid, width: self.shape.out, data: Arc::from(out) };
        (rows, times)
    }

    fn norm(&self, x: &[f32], norm: &weights::Norm, out: &mut [f32]) {
        layer_norm(&self.pool, Simd::current(), x, &norm.weight, &norm.bias, self.shape.eps, out);
    }

    fn linear(&self, layer: &strata_kernels::cpu::dense::Linear, activation: Activation, x: &[f32], out: &mut [f32]) {
        linear(&self.pool, Simd::current(), layer, activation, x, out);
    }

    /// `x += down(gelu(up(norm(x))))`, a few thousand rows at a time.
    fn mlp(&self, layer: &Layer, x: &mut [f32], work: &mut Work) {
        let hidden = self.shape.hidden;
        for rows in x.chunks_mut(MLP_ROWS * hidden) {
            let n = rows.len() / hidden;
            let normed = &mut work.normed[..n * hidden];
            let inner = &mut work.inner[..n * self.shape.feed_forward];
            let added = &mut work.added[..n * hidden];
            self.norm(rows, &layer.ln2, normed);
            self.linear(&layer.ffn_up, Activation::GeluTanh, normed, inner);
            self.linear(&layer.ffn_down, Activation::None, inner, added);
            add_rows(&self.pool, rows, added);
        }
    }

    /// The patches' embeddings with their learned positions, `[patches, hidden]`.
    fn embed(&self, picture: &Preprocessed, patches: &PatchGrid) -> Vec<f32> {
        let values = self.patch_values(picture, patches);
        let hidden = self.shape.hidden;
        let mut x = vec![0.0; patches.len() * hidden];
        self.linear(&self.weights.patch_embd, Activation::None, &values, &mut x);
        let side = self.shape.position_side;
        let rows: Vec<AlignedTaps> = (0..patches.rows).map(|r| AlignedTaps::new(r, patches.rows, side)).collect();
        let cols: Vec<AlignedTaps> = (0..patches.cols).map(|c| AlignedTaps::new(c, patches.cols, side)).collect();
        let entry = |row: usize, col: usize| &self.weights.positions[(row * side + col) * hidden..][..hidden];
        for (out, (r, c)) in x.chunks_exact_mut(hidden).zip(patches.iter()) {
            let (row, col) = (&rows[r], &cols[c]);
            let corners = [
                (entry(row.low, col.low), (1.0 - row.share) * (1.0 - col.share)),
                (entry(row.low, col.high), (1.0 - row.share) * col.share),
                (entry(row.high, col.low), row.share * (1.0 - col.share)),
                (entry(row.high, col.high), row.share * col.share),
            ];
            for (i, value) in out.iter_mut().enumerate() {
                let mut sum = 0.0;
                for (corner, weight) in corners {
                    sum += corner[i] * weight;
                }
                *value += sum;
            }
        }
        x
    }

    /// The normalised pixels of every patch, `[patches, 3 * patch * patch]`, channel by channel.
    fn patch_values(&self, picture: &Preprocessed, patches: &PatchGrid) -> Vec<f32> {
        let PictureGeometry { patch, mean, std, .. } = self.shape.picture;
        // Bytes scaled to 0..1, less the mean, over the deviation, with the division by 255 carried into both.
        let table: [[f32; 256]; 3] =
            std::array::from_fn(|c| std::array::from_fn(|v| (v as f32 - mean[c] * 255.0) / (std[c] * 255.0)));
        let stride = picture.size.0 as usize * 3;
        let mut values = vec![0.0; patches.len() * self.shape.patch_values()];
        for (out, (r, c)) in values.chunks_exact_mut(self.shape.patch_values()).zip(patches.iter()) {
            for y in 0..patch {
                let line = &picture.rgb[(r * patch + y) * stride + c * patch * 3..][..patch * 3];
                for (x, pixel) in line.as_chunks::<3>().0.iter().enumerate() {
                    for channel in 0..3 {
                        out[(channel * patch + y) * patch + x] = table[channel][usize::from(pixel[channel])];
                    }
                }
            }
        }
        values
    }

    /// Cosines and sines of every patch's pairs, `[patches, head / 2]`: the first half of the pairs turn with the patch's
    /// row, the second half with its column.
    fn rotation(&self, patches: &PatchGrid) -> (Vec<f32>, Vec<f32>) {
        let half = self.shape.head() / 2;
        let per_axis = half / 2;
        // In f32 as the reference computes them: exponent, power, reciprocal, then the product with the coordinate.
        let frequencies: Vec<f32> =
            (0..per_axis).map(|i| 1.0 / (ROPE_BASE.powf(f64::from(2.0 * i as f32 / half as f32)) as f32)).collect();
        let angles = |coordinate: usize| frequencies.iter().map(move |f| f64::from(coordinate as f32 * f));
        let mut cos = Vec::with_capacity(patches.len() * half);
        let mut sin = Vec::with_capacity(patches.len() * half);
        for (r, c) in patches.iter() {
            for angle in angles(r).chain(angles(c)) {
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
        }
        (cos, sin)
    }
}

/// Buffers used by every block.
struct Work {
    /// `[patches, hidden]`.
    normed: Vec<f32>,
    /// `[patches, 3 * hidden]`.
    qkv: Vec<f32>,
    /// `[patches, hidden]`.
    added: Vec<f32>,
    /// `[min(patches, MLP_ROWS), feed_forward]`.
    inner: Vec<f32>,
}

impl Work {
    fn new(patches: usize, shape: &EncoderShape) -> Self {
        Self {
            normed: vec![0.0; patches * shape.hidden],
            qkv: vec![0.0; patches * 3 * shape.hidden],
            added: vec![0.0; patches * shape.hidden],
            inner: vec![0.0; patches.min(MLP_ROWS) * shape.feed_forward],
        }
    }
}

/// The patches of a picture, merged block by merged block.
struct PatchGrid {
    rows: usize,
    cols: usize,
    merge: usize,
}

impl PatchGrid {
    fn new(grid: (u32, u32), merge: usize) -> Self {
        Self { rows: grid.0 as usize * merge, cols: grid.1 as usize * merge, merge }
    }

    fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Row and column of every patch: block row, block column, row in the block, column in the block.
    fn iter(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Self { rows, cols, merge } = *self;
        (0..rows / merge).flat_map(move |block_row| {
            (0..cols / merge).flat_map(move |block_col| {
                (0..merge).flat_map(move |r| (0..merge).map(move |c| (block_row * merge + r, block_col * merge + c)))
            })
        })
    }
}

/// Where coordinate `at` of `len` falls on a table of `side`, first on first and last on last.
struct AlignedTaps {
    low: usize,
    high: usize,
    share: f32,
}

impl AlignedTaps {
    fn new(at: usize, len: usize, side: usize) -> Self {
        let place = (at * (side - 1)) as f32 / (len.max(2) - 1) as f32;
        let low = (place as usize).min(side - 1);
        Self { low, high: (low + 1).min(side - 1), share: place - low as f32 }
    }
}
