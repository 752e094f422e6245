//! Preprocessing and encoder against the reference, on the goldens of `scripts/make_vision_goldens.py`.

use super::decode::decode;
use super::preprocess::preprocess;
use super::resize::{bicubic, target_size};
use super::{PreprocessOptions, Preprocessed, VisionEncoder, VisionError};
use serde::Deserialize;
use std::path::PathBuf;

/// Distance of an encoder row's values from the reference, relative to the largest value: f32 rounding through four
/// blocks, summed in another order, and weights stored as F16.
const ROW_TOLERANCE: f32 = 2e-5;
/// The same where the decoders of a lossy format round differently: zune-jpeg and libjpeg-turbo are up to
/// [`LOSSY_PIXELS`] apart after resizing.
const LOSSY_ROW_TOLERANCE: f32 = 0.05;
/// Pixels of a lossless format equal Pillow's: at most 1/255.
const EXACT_PIXELS: i32 = 1;
/// Pixels of JPEG and lossy WebP after resizing: the inverse transform and the colour conversion may each be off by one.
const LOSSY_PIXELS: i32 = 4;

const COLUMNS: usize = 8;

#[derive(Deserialize)]
struct Expected {
    name: String,
    source: (u32, u32),
    size: (u32, u32),
    animated: bool,
    pixel_bytes: usize,
    scale: f32,
    rows: Vec<usize>,
    values: Vec<Vec<f32>>,
    products: Vec<Vec<f32>>,
}

impl Expected {
    fn lossy(&self) -> bool {
        self.name.ends_with(".jpg") || self.name == "lossy.webp"
    }
}

fn golden(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")).join(name)
}

fn read(name: &str) -> Vec<u8> {
    let path = golden(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn expected() -> Vec<Expected> {
    serde_json::from_slice(&read("vision/expected.json")).unwrap()
}

fn encoder(threads: usize) -> VisionEncoder {
    VisionEncoder::open(&golden("tiny-mmproj.gguf"), threads).unwrap()
}

fn prepared(encoder: &VisionEncoder, name: &str) -> Preprocessed {
    let options = PreprocessOptions { max_tokens: 64, min_tokens: 4 };
    encoder.preprocess(&read(&format!("vision/pictures/{name}")), &options).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The sign of column `c` in vector `v`, as the script has it.
fn sign(v: u32, c: u32) -> f64 {
    let mut h = v.wrapping_mul(0x9E37_79B1).wrapping_add(c.wrapping_mul(0x85EB_CA6B)).wrapping_add(0x0123_4567);
    h ^= h >> 15;
    h = h.wrapping_mul(0x2C1B_3C6D);
    h ^= h >> 12;
    h = h.wrapping_mul(0x297A_2D39);
    if h >> 31 == 1 { -1.0 } else { 1.0 }
}

#[test]
fn sizes_equal_the_reference() {
    let text = String::from_utf8(read("vision/sizes.csv")).unwrap();
    let mut refused = 0;
    for line in text.lines() {
        let n: Vec<u64> = line.split(',').map(|n| n.parse().unwrap()).collect();
        let [width, height, factor, min, max, to_width, to_height] = n[..] else { panic!("{line}") };
        match target_size(width as u32, height as u32, factor as usize, min, max) {
            Ok(size) => assert_eq!((u64::from(size.0), u64::from(size.1)), (to_width, to_height), "{line}"),
            Err(VisionError::Aspect { .. }) => {
                assert_eq!((to_width, to_height), (0, 0), "{line}");
                refused += 1;
            }
            Err(e) => panic!("{line}: {e}"),
        }
    }
    assert_eq!(text.lines().count(), 1000);
    assert!(refused > 10, "the sizes include some that are refused");
}

#[test]
fn pixels_equal_pillow() {
    let encoder = encoder(1);
    let pixels = read("vision/pixels.bin");
    let mut rest = &pixels[..];
    for picture in expected() {
        let (reference, after) = rest.split_at(picture.pixel_bytes);
        rest = after;
        let found = prepared(&encoder, &picture.name);
        assert_eq!(found.source_size, picture.source, "{}", picture.name);
        assert_eq!(found.size, picture.size, "{}", picture.name);
        assert_eq!(!found.notes.is_empty(), picture.animated, "{}: {:?}", picture.name, found.notes);
        let bound = if picture.lossy() { LOSSY_PIXELS } else { EXACT_PIXELS };
        let thinned: Vec<u8> = found.rgb.iter().copied().step_by(7).collect();
        assert_eq!(thinned.len(), reference.len(), "{}", picture.name);
        let worst = thinned.iter().zip(reference).map(|(&a, &b)| (i32::from(a) - i32::from(b)).abs()).max().unwrap();
        assert!(worst <= bound, "{}: pixels are off by {worst}, allowed {bound}", picture.name);
    }
    assert!(rest.is_empty());
}

#[test]
fn rows_equal_the_reference_encoder() {
    let encoder = encoder(2);
    let mut lossless = 0;
    for picture in expected() {
        let rows = encoder.encode(&prepared(&encoder, &picture.name));
        assert_eq!(rows.rows(), picture.products.len(), "{}", picture.name);
        let tolerance = if picture.lossy() { LOSSY_ROW_TOLERANCE } else { ROW_TOLERANCE } * picture.scale;
        lossless += usize::from(!picture.lossy());
        for (&r, values) in picture.rows.iter().zip(&picture.values) {
            for (i, expected) in values.iter().enumerate().take(COLUMNS) {
                let found = rows.row(r)[(i * 37 + 5) % rows.width];
                let error = (found - expected).abs();
                assert!(error <= tolerance, "{}: row {r} is off by {error}, allowed {tolerance}", picture.name);
            }
        }
        // The errors of a row's values add up as a random walk.
        let product_tolerance = tolerance * (rows.width as f32).sqrt();
        for (r, products) in picture.products.iter().enumerate() {
            for (v, &expected) in products.iter().enumerate() {
                let found: f64 =
                    rows.row(r).iter().enumerate().map(|(c, &x)| f64::from(x) * sign(v as u32, c as u32)).sum();
                let error = (found as f32 - expected).abs();
                assert!(error <= product_tolerance, "{}: product {v} of row {r} is off by {error}", picture.name);
            }
        }
    }
    assert!(lossless >= 12);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let (one, three) = (encoder(1), encoder(3));
    for name in ["large.png", "thin.png"] {
        let (a, b) = (one.encode(&prepared(&one, name)), three.encode(&prepared(&three, name)));
        assert_eq!(a.key, b.key);
        assert!(a.data.iter().zip(b.data.iter()).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
    }
}

#[test]
fn keys_follow_pixels_and_settings_and_not_the_file() {
    let encoder = encoder(1);
    let key = |rgb: &[u8], options: &PreprocessOptions| {
        let mut png = Vec::new();
        let image = image::RgbImage::from_raw(64, 64, rgb.to_vec()).unwrap();
        image.write_to(&mut std::io::Cursor::new(&mut png), image::ImageFormat::Png).unwrap();
        let mut bmp = Vec::new();
        image.write_to(&mut std::io::Cursor::new(&mut bmp), image::ImageFormat::Bmp).unwrap();
        let keys = [png, bmp].map(|file| encoder.preprocess(&file, options).unwrap().key);
        assert_eq!(keys[0], keys[1], "the same pixels in another format have the same key");
        keys[0]
    };
    let options = PreprocessOptions { max_tokens: 64, min_tokens: 4 };
    let mut rgb = vec![7; 64 * 64 * 3];
    let first = key(&rgb, &options);
    rgb[5000] += 1;
    assert_ne!(key(&rgb, &options), first, "one pixel");
    rgb[5000] -= 1;
    assert_eq!(key(&rgb, &options), first);
    assert_ne!(key(&rgb, &PreprocessOptions { max_tokens: 64, min_tokens: 9 }), first, "another size");
    let file = read("vision/pictures/rgb.png");
    let of = |identity| preprocess(&file, encoder.geometry(), &options, identity).unwrap().key;
    assert_ne!(of(&[0; 32]), of(&[1; 32]), "another encoder");
}

#[test]
fn an_unchanged_size_keeps_every_byte() {
    let picture = decode(&read("vision/pictures/exact.png")).unwrap();
    assert_eq!(bicubic(&picture.rgb, 128, 96, 128, 96), picture.rgb);
}
