//! The bundled model with its metadata and tensors changed, written and read back.

use super::golden;
use bytes::Bytes;
use strata_core::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, WriterOptions};
use strata_kernels::format::{self, TensorType};

/// Metadata and tensors of a model file, to be changed.
pub struct Edited {
    pub metadata: Metadata,
    pub tensors: Vec<(TensorDecl, Bytes)>,
}

impl Edited {
    /// The bundled model as it is.
    pub fn bundled() -> Edited {
        let file = GgufFile::open(&golden("tiny.gguf")).expect("the bundled model opens");
        let tensor = |t: &strata_core::gguf::TensorInfo| {
            (TensorDecl { name: t.name.clone(), dims: t.dims.clone(), ty: t.ty }, file.data(t))
        };
        Edited { metadata: file.metadata().clone(), tensors: file.tensors().iter().map(tensor).collect() }
    }

    /// The file these make.
    pub fn file(&self) -> GgufFile {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("edited.gguf");
        let declared = self.tensors.iter().map(|(decl, _)| decl.clone()).collect();
        let options = WriterOptions::default();
        let mut writer = GgufWriter::create(&path, &self.metadata, declared, &options).expect("can be written");
        for (decl, data) in &self.tensors {
            writer.write(&decl.name, data).expect("is written");
        }
        writer.finish().expect("is complete");
        GgufFile::from_bytes("edited.gguf", std::fs::read(&path).expect("reads").into()).expect("opens")
    }

    pub fn position(&self, name: &str) -> usize {
        self.tensors.iter().position(|(decl, _)| decl.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn get(&self, name: &str) -> &(TensorDecl, Bytes) {
        &self.tensors[self.position(name)]
    }

    pub fn get_mut(&mut self, name: &str) -> &mut (TensorDecl, Bytes) {
        let at = self.position(name);
        &mut self.tensors[at]
    }

    pub fn remove(&mut self, name: &str) -> (TensorDecl, Bytes) {
        let at = self.position(name);
        self.tensors.remove(at)
    }

    /// Takes out all tensors of a block.
    pub fn take_block(&mut self, block: usize) -> Vec<(TensorDecl, Bytes)> {
        let prefix = format!("blk.{block}.");
        let (taken, kept) =
            std::mem::take(&mut self.tensors).into_iter().partition(|(decl, _)| decl.name.starts_with(&prefix));
        self.tensors = kept;
        taken
    }

    /// Adds tensors of a block under another block's number.
    pub fn add_block(&mut self, block: usize, tensors: &[(TensorDecl, Bytes)]) {
        for (decl, data) in tensors {
            let rest = decl.name.splitn(3, '.').nth(2).expect("blk.N.rest");
            let decl = TensorDecl { name: format!("blk.{block}.{rest}"), ..decl.clone() };
            self.tensors.push((decl, data.clone()));
        }
    }

    /// Stores an F32 tensor as F16 or BF16, and gives the F32 tensor with the values that are left.
    pub fn round(&self, name: &str, ty: TensorType) -> ((TensorDecl, Bytes), (TensorDecl, Bytes)) {
        let (decl, data) = self.get(name);
        let mut values = vec![0.0; decl.dims.iter().product::<u64>() as usize];
        format::dequantize(decl.ty, data, &mut values).expect("reads");
        let bytes: Vec<u8> = match ty {
            TensorType::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
            TensorType::BF16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
            _ => unreachable!("F16 and BF16 only"),
        };
        format::dequantize(ty, &bytes, &mut values).expect("reads");
        let wide: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let of = |ty, bytes: Vec<u8>| (TensorDecl { ty, ..decl.clone() }, Bytes::from(bytes));
        (of(ty, bytes), of(TensorType::F32, wide))
    }
}
