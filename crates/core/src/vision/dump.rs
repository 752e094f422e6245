//! Encoded rows and resized pictures in files, and the comparison of two sets of rows.

use super::{PictureRows, Preprocessed, VisionError};
use crate::checkpoint::{Checkpoint, Dtype};
use crate::output::{Existing, OutputFile};
use std::path::Path;
use strata_kernels::format::{TensorType, dequantize};

/// Writes `rows` as a safetensors file: `rows` `[blocks, width]` F32 and `grid` `[2]` I32 (blocks down and across).
///
/// # Errors
/// When the file cannot be written.
pub fn write_rows(path: &Path, rows: &PictureRows) -> Result<(), VisionError> {
    let data_len = size_of_val::<[f32]>(&rows.data);
    let header = serde_json::json!({
        "rows": { "dtype": "F32", "shape": [rows.rows(), rows.width], "data_offsets": [0, data_len] },
        "grid": { "dtype": "I32", "shape": [2], "data_offsets": [data_len, data_len + 8] },
    });
    let mut header = header.to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = OutputFile::create(path)?;
    file.append(&(header.len() as u64).to_le_bytes())?;
    file.append(header.as_bytes())?;
    for value in rows.data.iter() {
        file.append(&value.to_le_bytes())?;
    }
    file.append(&rows.grid.0.to_le_bytes())?;
    file.append(&rows.grid.1.to_le_bytes())?;
    Ok(file.finish(Existing::Replace)?)
}

/// Reads the tensor `rows` of a safetensors file as f32, with its shape.
///
/// # Errors
/// When the file is no safetensors file, has no such tensor, or not as F32, F16 or BF16.
pub fn read_rows(path: &Path) -> Result<(Vec<f32>, Vec<usize>), VisionError> {
    let bad = |reason: String| VisionError::Dump { path: path.to_path_buf(), reason };
    let file = Checkpoint::open(path)?;
    let tensor = file.tensor("rows").ok_or_else(|| bad("it has no tensor named rows".into()))?;
    let ty = match tensor.dtype {
        Dtype::F32 => TensorType::F32,
        Dtype::F16 => TensorType::F16,
        Dtype::BF16 => TensorType::BF16,
        other => return Err(bad(format!("rows is {}, expected F32, F16 or BF16", other.name()))),
    };
    let data = file.data(tensor)?;
    let mut values = vec![0.0; tensor.elements()];
    dequantize(ty, &data, &mut values).map_err(|e| bad(e.to_string()))?;
    Ok((values, tensor.shape.clone()))
}

/// Writes the resized picture as PNG: what the encoder sees.
///
/// # Errors
/// When the file cannot be written.
pub fn write_png(path: &Path, picture: &Preprocessed) -> Result<(), VisionError> {
    use image::ImageEncoder;
    let mut png = Vec::new();
    image::codecs::png::PngEncoder::new(&mut png)
        .write_image(&picture.rgb, picture.size.0, picture.size.1, image::ExtendedColorType::Rgb8)
        .map_err(|error| VisionError::Options(format!("cannot make a PNG of the picture: {error}")))?;
    Ok(crate::output::write_whole(path, &png)?)
}

/// How far two sets of rows are apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Largest difference of two values.
    pub largest: f32,
    /// Root of the mean squared difference.
    pub rms: f32,
    /// Largest absolute value of the reference.
    pub scale: f32,
    /// The block and the column of the largest difference.
    pub at: (usize, usize),
}

impl Comparison {
    /// The largest difference relative to the largest value of the reference.
    pub fn relative(&self) -> f32 {
        self.largest / self.scale.max(f32::MIN_POSITIVE)
    }
}

/// Compares rows with a reference `[blocks, width]`.
///
/// # Errors
/// When the shapes differ.
pub fn compare(rows: &PictureRows, reference: &[f32], shape: &[usize]) -> Result<Comparison, VisionError> {
    if shape != [rows.rows(), rows.width] || reference.len() != rows.data.len() {
        return Err(VisionError::Options(format!(
            "cannot compare: the reference has shape {shape:?}, the picture gives [{}, {}]",
            rows.rows(),
            rows.width
        )));
    }
    let mut found = Comparison { largest: 0.0, rms: 0.0, scale: 0.0, at: (0, 0) };
    let mut squares = 0.0;
    for (i, (&a, &b)) in rows.data.iter().zip(reference).enumerate() {
        let difference = (a - b).abs();
        // A NaN on either side counts as the largest difference there can be.
        if difference.is_nan() || difference > found.largest {
            found.largest = if difference.is_nan() { f32::INFINITY } else { difference };
            found.at = (i / rows.width, i % rows.width);
        }
        squares += f64::from(difference) * f64::from(difference);
        found.scale = found.scale.max(b.abs());
    }
    found.rms = (squares / reference.len().max(1) as f64).sqrt() as f32;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> PictureRows {
        PictureRows { key: [0; 32], grid: (1, 2), width: 3, data: [1.0, -2.0, 3.0, 4.5, 0.0, -8.0].as_slice().into() }
    }

    #[test]
    fn written_rows_are_read_by_the_safetensors_crate() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.safetensors");
        write_rows(&path, &rows()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor("rows").unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (safetensors::Dtype::F32, &[2, 3][..]));
        assert_eq!(tensor.data(), rows().data.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
        assert_eq!(file.tensor("grid").unwrap().data(), [1, 0, 0, 0, 2, 0, 0, 0]);
        let (values, shape) = read_rows(&path).unwrap();
        assert_eq!((values.as_slice(), shape.as_slice()), (&rows().data[..], &[2, 3][..]));
    }

    #[test]
    fn comparison_names_the_largest_difference_and_sees_nan() {
        let mut reference = rows().data.to_vec();
        assert_eq!(compare(&rows(), &reference, &[2, 3]).unwrap().largest, 0.0);
        reference[4] = 0.5;
        let found = compare(&rows(), &reference, &[2, 3]).unwrap();
        assert_eq!((found.largest, found.at, found.relative()), (0.5, (1, 1), 0.0625));
        reference[0] = f32::NAN;
        assert_eq!(compare(&rows(), &reference, &[2, 3]).unwrap().largest, f32::INFINITY);
        assert!(compare(&rows(), &reference, &[3, 2]).is_err());
    }
}
