//! [`Device`] on the CPU: weights in place, work buffers on the heap, one thread pool.

use super::attention::{self, attention};
use super::delta_net::{self, CpuDeltaState, delta_net};
use super::kv_cache::CpuKvCache;
use super::moe::{self, GateUp, moe};
use super::{Activations, Pool, Simd, matmul, norm};
use crate::device::{
    AttentionInput, AttentionShape, AttentionWeights, DeltaInput, DeltaShape, DeltaWeights, Device, DeviceError,
    EmbedRow, ExpertGateUp, KvType, MoeShape, MoeWeights, Sink, SlotRows, check_matrix,
};
use crate::{Matrix, format};
use std::io;

/// The CPU with a fixed number of threads.
pub struct CpuDevice {
    pool: Pool,
    simd: Simd,
}

/// Work space of the CPU's ops.
#[derive(Default)]
pub struct CpuScratch {
    input: Activations,
    attention: attention::Work,
    delta: delta_net::Work,
    moe: moe::Work,
}

impl CpuDevice {
    /// A device that computes on `threads` threads, the caller's included, with the best instructions there are.
    pub fn new(threads: usize) -> CpuDevice {
        CpuDevice { pool: Pool::new(threads), simd: Simd::current() }
    }

    /// The thread pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl Device for CpuDevice {
    type Weight = Matrix;
    type Vector = Vec<f32>;
    type Buffer = Vec<f32>;
    type KvCache = CpuKvCache;
    type DeltaState = CpuDeltaState;
    type Scratch = CpuScratch;

    fn weight(&self, matrix: Matrix) -> Result<Matrix, DeviceError> {
        check_matrix(&matrix)?;
        Ok(matrix)
    }

    fn weight_rows(&self, weight: &Matrix, rows: usize) -> Matrix {
        let rows = rows.min(weight.rows);
        let bytes = weight.data.len() / weight.rows * rows;
        Matrix { rows, data: weight.data.slice(..bytes), ..weight.clone() }
    }

    fn vector(&self, values: Vec<f32>) -> Vec<f32> {
        values
    }

    fn scratch(&self) -> CpuScratch {
        CpuScratch::default()
    }

    fn upload(&self, values: &[f32], out: &mut Vec<f32>) {
        out.clear();
        out.extend_from_slice(values);
    }

    fn download(&self, buffer: &Vec<f32>, out: &mut Vec<f32>) {
        out.extend_from_slice(buffer);
    }

    fn embed(&self, table: &Matrix, rows: &[EmbedRow<'_>], out: &mut Vec<f32>) {
        let width = table.cols;
        let bytes = table.data.len() / table.rows;
        out.resize(rows.len() * width, 0.0);
        for (row, out) in rows.iter().zip(out.chunks_exact_mut(width)) {
            match row {
                EmbedRow::Values(values) => out.copy_from_slice(values),
                EmbedRow::Token(id) => {
                    let start = *id as usize * bytes;
                    format::dequantize(table.ty, &table.data[start..start + bytes], out)
                        .expect("a checked matrix has whole rows of a computable format");
                }
            }
        }
    }

    fn gather(&self, x: &Vec<f32>, width: usize, rows: &[usize], out: &mut Vec<f32>) {
        out.clear();
        rows.iter().for_each(|&row| out.extend_from_slice(&x[row * width..(row + 1) * width]));
    }

    fn concat(&self, a: &Vec<f32>, b: &Vec<f32>, width: usize, out: &mut Vec<f32>) {
        out.clear();
        for (a, b) in a.chunks_exact(width).zip(b.chunks_exact(width)) {
            out.extend_from_slice(a);
            out.extend_from_slice(b);
        }
    }

    fn rms_norm(&self, x: &Vec<f32>, weight: &Vec<f32>, eps: f32, out: &mut Vec<f32>) {
        out.resize(x.len(), 0.0);
        norm::rms_norm(self.simd, x, weight, eps, out);
    }

    fn add(&self, x: &mut Vec<f32>, y: &Vec<f32>) {
        norm::add(self.simd, x, y);
    }

    fn matmul(&self, scratch: &mut CpuScratch, x: &Vec<f32>, rows: usize, weights: &mut [(&Matrix, &mut Vec<f32>)]) {
        let Some((first, _)) = weights.first() else { return };
        scratch.input.set(x, rows, first.cols);
        let mut pairs: Vec<(&Matrix, &mut [f32])> = weights
            .iter_mut()
            .map(|(weight, out)| {
                out.resize(rows * weight.rows, 0.0);
                (*weight, &mut out[..])
            })
            .collect();
        matmul::matmul(&self.pool, &mut pairs, &scratch.input);
    }

    fn attention(
        &self,
        scratch: &mut CpuScratch,
        shape: &AttentionShape,
        weights: &AttentionWeights<Self>,
        input: AttentionInput<'_, Self>,
        slots: &[SlotRows],
        caches: &mut [&mut CpuKvCache],
        out: &mut Vec<f32>,
    ) {
        let rows = attention::Rows { q: input.q, k: input.k, v: input.v, rope: input.rope };
        let norms = (&weights.q_norm[..], &weights.k_norm[..]);
        attention(self.simd, &self.pool, shape, norms, &rows, slots, caches, &mut scratch.attention, out);
    }

    fn delta_net(
        &self,
        scratch: &mut CpuScratch,
        shape: &DeltaShape,
        weights: &DeltaWeights<Self>,
        input: DeltaInput<'_, Self>,
        slots: &[SlotRows],
        states: &mut [&mut CpuDeltaState],
        out: &mut Vec<f32>,
    ) {
        let weights =
            delta_net::Weights { conv: &weights.conv, dt_bias: &weights.dt_bias, a: &weights.a, norm: &weights.norm };
        let rows = delta_net::Rows { qkv: input.qkv, z: input.z, beta: input.beta, alpha: input.alpha };
        delta_net(self.simd, &self.pool, shape, &weights, &rows, slots, states, &mut scratch.delta, out);
    }

    fn delta_commit(&self, state: &mut CpuDeltaState, rows: usize) {
        delta_net::commit(state, rows);
    }

    fn moe(
        &self,
        scratch: &mut CpuScratch,
        shape: &MoeShape,
        weights: &MoeWeights<Self>,
        x: &Vec<f32>,
        rows: usize,
        residual: &mut Vec<f32>,
    ) {
        scratch.input.set(x, rows, shape.hidden);
        let weights = moe::Weights {
            router: &weights.router,
            gate_up: match &weights.gate_up {
                ExpertGateUp::Split { gate, up } => GateUp::Split(gate, up),
                ExpertGateUp::Fused(gate_up) => GateUp::Fused(gate_up),
            },
            down: &weights.down,
            shared_router: &weights.shared_router,
            shared_gate: &weights.shared_gate,
            shared_up: &weights.shared_up,
            shared_down: &weights.shared_down,
        };
        moe(self.simd, &self.pool, shape, &weights, &scratch.input, rows, &mut scratch.moe, residual);
    }

    fn kv_cache(&self, shape: &AttentionShape, kv_type: KvType) -> CpuKvCache {
        CpuKvCache::new(shape, kv_type)
    }

    fn kv_cache_bytes(&self, shape: &AttentionShape, kv_type: KvType, rows: usize) -> u64 {
        CpuKvCache::bytes(shape, kv_type, rows)
    }

    fn kv_copy(&self, from: &CpuKvCache, rows: usize, to: &mut CpuKvCache) {
        to.copy_from(from, rows);
    }

    fn kv_export(&self, cache: &CpuKvCache, rows: usize, sink: Sink<'_>) -> io::Result<()> {
        cache.export(rows, sink)
    }

    fn kv_import(&self, cache: &mut CpuKvCache, rows: usize, source: &mut dyn io::Read) -> io::Result<()> {
        cache.import(rows, source)
    }

    fn delta_state(&self, shape: &DeltaShape) -> CpuDeltaState {
        CpuDeltaState::new(shape)
    }

    fn delta_state_bytes(&self, shape: &DeltaShape, verify_rows: usize) -> u64 {
        CpuDeltaState::bytes(shape, verify_rows)
    }

    fn delta_reset(&self, state: &mut CpuDeltaState) {
        state.reset();
    }

    fn delta_copy(&self, from: &CpuDeltaState, to: &mut CpuDeltaState) {
        to.copy_from(from, self.simd, &self.pool);
    }

    fn delta_export(&self, state: &CpuDeltaState, sink: Sink<'_>) -> io::Result<()> {
        sink(bytemuck::cast_slice(&state.conv))?;
        sink(bytemuck::cast_slice(&state.settled_matrix(self.simd, &self.pool)))
    }

    fn delta_import(&self, state: &mut CpuDeltaState, source: &mut dyn io::Read) -> io::Result<()> {
        let (conv, matrix) = state.parts_mut();
        source.read_exact(bytemuck::cast_slice_mut(conv))?;
        source.read_exact(bytemuck::cast_slice_mut(matrix))
    }
}
