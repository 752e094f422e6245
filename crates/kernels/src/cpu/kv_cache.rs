//! Keys and values of one attention layer of one slot.
//!
//! The cache grows in pages of [`PAGE_ROWS`] rows, so a long context costs only what is used. Pages are shared between
//! copies until one of them writes (a copied conversation costs no memory at first). Inside a page the keys of sixteen
//! rows lie side by side per dim, so that attention scores come out in lanes without sums over lanes; values lie row by
//! row.

use super::lanes::LANES;
use crate::device::{AttentionShape, KvType, Sink};
use std::io;
use std::sync::Arc;

/// Rows of a page, and of a partial softmax: the order of all sums of attention follows from it.
pub(crate) const PAGE_ROWS: usize = 64;

/// Storage of one kind of value: `[kv_heads][keys: PAGE_ROWS/16 x head_dim x 16 | values: PAGE_ROWS x head_dim]`.
#[derive(Clone)]
pub(crate) enum Page {
    F16(Vec<u16>),
    F32(Vec<f32>),
}

/// Keys and values of one layer of one slot. Which rows are valid is the owner's business.
pub struct CpuKvCache {
    kv_heads: usize,
    head_dim: usize,
    kv_type: KvType,
    pages: Vec<Arc<Page>>,
}

/// Index of key dim `dim` of row `row` (in its page) within a head's keys.
#[inline(always)]
fn key_index(head_dim: usize, row: usize, dim: usize) -> usize {
    (row / LANES * head_dim + dim) * LANES + row % LANES
}

/// The nearest half, held within the finite ones.
#[inline(always)]
fn to_f16(x: f32) -> u16 {
    half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits()
}

impl CpuKvCache {
    pub(crate) fn new(shape: &AttentionShape, kv_type: KvType) -> CpuKvCache {
        CpuKvCache { kv_heads: shape.kv_heads, head_dim: shape.head_dim, kv_type, pages: Vec::new() }
    }

    fn head_len(&self) -> usize {
        2 * PAGE_ROWS * self.head_dim
    }

    fn fresh_page(&self) -> Page {
        let len = self.kv_heads * self.head_len();
        match self.kv_type {
            KvType::F16 => Page::F16(vec![0; len]),
            KvType::F32 => Page::F32(vec![0.0; len]),
        }
    }

    /// Makes rows `from .. to` writable: adds pages and copies shared ones.
    pub(crate) fn reserve(&mut self, from: usize, to: usize) {
        while self.pages.len() * PAGE_ROWS < to {
            self.pages.push(Arc::new(self.fresh_page()));
        }
        if to > from {
            for page in &mut self.pages[from / PAGE_ROWS..to.div_ceil(PAGE_ROWS)] {
                Arc::make_mut(page);
            }
        }
    }

    /// Writes a row's keys and values, `kv_heads x head_dim` each. The row must have been reserved.
    pub(crate) fn write(&mut self, row: usize, keys: &[f32], values: &[f32]) {
        let (head_dim, head_len) = (self.head_dim, self.head_len());
        let page = Arc::make_mut(&mut self.pages[row / PAGE_ROWS]);
        let row = row % PAGE_ROWS;
        let heads = keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim)).enumerate();
        for (head, (keys, values)) in heads {
            let key_start = head * head_len;
            let value_start = key_start + (PAGE_ROWS + row) * head_dim;
            match page {
                Page::F16(data) => {
                    for (dim, &key) in keys.iter().enumerate() {
                        data[key_start + key_index(head_dim, row, dim)] = to_f16(key);
                    }
                    let out = &mut data[value_start..value_start + head_dim];
                    out.iter_mut().zip(values).for_each(|(out, &value)| *out = to_f16(value));
                }
                Page::F32(data) => {
                    for (dim, &key) in keys.iter().enumerate() {
                        data[key_start + key_index(head_dim, row, dim)] = key;
                    }
                    data[value_start..value_start + head_dim].copy_from_slice(values);
                }
            }
        }
    }

    /// Page number `page`.
    pub(crate) fn page(&self, page: usize) -> &Page {
        &self.pages[page]
    }

    /// Where a head's keys start in a page, and its values.
    pub(crate) fn head_start(&self, head: usize) -> (usize, usize) {
        let start = head * self.head_len();
        (start, start + PAGE_ROWS * self.head_dim)
    }

    /// Bytes of the pages for `rows` rows.
    pub(crate) fn bytes(shape: &AttentionShape, kv_type: KvType, rows: usize) -> u64 {
        let values = rows.div_ceil(PAGE_ROWS) * PAGE_ROWS * 2 * shape.kv_heads * shape.head_dim;
        (values * kv_type.bytes()) as u64
    }

    /// Shares the pages of the first `rows` rows of another cache.
    pub(crate) fn copy_from(&mut self, from: &CpuKvCache, rows: usize) {
        self.pages.clear();
        self.pages.extend(from.pages.iter().take(rows.div_ceil(PAGE_ROWS)).cloned());
    }

    /// The values of rows `first_row ..` of a page that are below `rows`, in a fixed order: per head the keys dim by dim,
    /// then the values row by row.
    pub(crate) fn export(&self, rows: usize, sink: Sink<'_>) -> io::Result<()> {
        let mut bytes = Vec::new();
        for (index, page) in self.pages.iter().enumerate() {
            let valid = rows.saturating_sub(index * PAGE_ROWS).min(PAGE_ROWS);
            if valid == 0 {
                break;
            }
            bytes.clear();
            self.for_each_valid(valid, |at| match &**page {
                Page::F16(data) => bytes.extend_from_slice(&data[at].to_le_bytes()),
                Page::F32(data) => bytes.extend_from_slice(&data[at].to_le_bytes()),
            });
            sink(&bytes)?;
        }
        Ok(())
    }

    pub(crate) fn import(&mut self, rows: usize, source: &mut dyn io::Read) -> io::Result<()> {
        self.pages.clear();
        let mut bytes = Vec::new();
        for first in (0..rows).step_by(PAGE_ROWS) {
            let valid = (rows - first).min(PAGE_ROWS);
            bytes.resize(valid * 2 * self.kv_heads * self.head_dim * self.kv_type.bytes(), 0);
            source.read_exact(&mut bytes)?;
            let mut page = self.fresh_page();
            let mut next = 0;
            self.for_each_valid(valid, |at| match &mut page {
                Page::F16(data) => {
                    data[at] = u16::from_le_bytes([bytes[next], bytes[next + 1]]);
                    next += 2;
                }
                Page::F32(data) => {
                    data[at] = f32::from_le_bytes([bytes[next], bytes[next + 1], bytes[next + 2], bytes[next + 3]]);
                    next += 4;
                }
            });
            self.pages.push(Arc::new(page));
        }
        Ok(())
    }

    fn for_each_valid(&self, valid: usize, mut visit: impl FnMut(usize)) {
        for head in 0..self.kv_heads {
            let (keys, values) = self.head_start(head);
            for row in 0..valid {
                (0..self.head_dim).for_each(|dim| visit(keys + key_index(self.head_dim, row, dim)));
            }
            (values..values + valid * self.head_dim).for_each(&mut visit);
        }
    }
}
