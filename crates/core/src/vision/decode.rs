//! Picture files to RGB bytes, under limits.
//!
//! The file's own orientation is applied, transparency is laid over white, 16-bit channels keep their high byte (as
//! Pillow does), and of an animation the first frame is taken and a note says so.

use super::VisionError;
use image::codecs::{bmp::BmpDecoder, gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder};
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, Limits};
use std::io::Cursor;

/// Longest file that is looked at.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
/// Most pixels that are decoded: more than any phone's single shot, and 200 MB as RGB.
pub const MAX_PIXELS: u64 = 1 << 26;
/// Most bytes the decoded picture may take, whatever its channels.
pub const MAX_DECODED_BYTES: u64 = 512 << 20;
/// Most scans of a JPEG. Progressive files have about ten; thousands of tiny ones are an attack on the decoder's time.
pub const MAX_JPEG_SCANS: u64 = 128;

/// A decoded picture.
#[derive(Debug)]
pub struct Picture {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// `[height, width, 3]`.
    pub rgb: Vec<u8>,
    /// Name of the file format.
    pub format: &'static str,
    /// What the caller should be told.
    pub notes: Vec<String>,
}

/// Decodes a PNG, JPEG, WebP, GIF or BMP.
///
/// # Errors
/// When the bytes are none of these, damaged, cut short, or over one of the limits of this module.
pub fn decode(bytes: &[u8]) -> Result<Picture, VisionError> {
    if bytes.is_empty() {
        return Err(VisionError::Empty);
    }
    within("file of bytes:", bytes.len() as u64, MAX_FILE_BYTES)?;
    let format = image::guess_format(bytes).ok();
    let input = || Cursor::new(bytes);
    let limits = || {
        let mut limits = Limits::no_limits();
        limits.max_alloc = Some(MAX_DECODED_BYTES);
        limits
    };
    let mut notes = Vec::new();
    let mut animated = |yes: bool| {
        if yes {
            notes.push("animated picture: only its first frame is read".to_string());
        }
    };
    let (name, (image, orientation)) = match format {
        Some(ImageFormat::Png) => {
            let decoder = PngDecoder::with_limits(input(), limits()).map_err(damaged("PNG"))?;
            animated(decoder.is_apng().map_err(damaged("PNG"))?);
            ("PNG", read(decoder, "PNG")?)
        }
        Some(ImageFormat::Jpeg) => {
            check_jpeg_scans(bytes)?;
            ("JPEG", read(JpegDecoder::new(input()).map_err(damaged("JPEG"))?, "JPEG")?)
        }
        Some(ImageFormat::WebP) => {
            let decoder = WebPDecoder::new(input()).map_err(damaged("WebP"))?;
            animated(decoder.has_animation());
            ("WebP", read(decoder, "WebP")?)
        }
        Some(ImageFormat::Gif) => {
            animated(check_gif_frames(bytes)? > 1);
            ("GIF", read(GifDecoder::new(input()).map_err(damaged("GIF"))?, "GIF")?)
        }
        Some(ImageFormat::Bmp) => ("BMP", read(BmpDecoder::new(input()).map_err(damaged("BMP"))?, "BMP")?),
        other => return Err(VisionError::UnknownFormat { found: describe(bytes, other) }),
    };
    let mut image = image;
    image.apply_orientation(orientation);
    let (width, height) = (image.width(), image.height());
    Ok(Picture { width, height, rgb: over_white(image), format: name, notes })
}

fn damaged(format: &'static str) -> impl Fn(ImageError) -> VisionError {
    move |error| VisionError::Decode { format, reason: error.to_string() }
}

fn within(what: &'static str, found: u64, limit: u64) -> Result<(), VisionError> {
    if found > limit { Err(VisionError::TooLarge { what, found, limit }) } else { Ok(()) }
}

/// Checks the sizes a decoder announces, then decodes.
fn read(
    mut decoder: impl ImageDecoder,
    format: &'static str,
) -> Result<(DynamicImage, image::metadata::Orientation), VisionError> {
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(VisionError::Decode { format, reason: format!("its size is {width}x{height}") });
    }
    within("pixels:", u64::from(width) * u64::from(height), MAX_PIXELS)?;
    within("decoded bytes:", decoder.total_bytes(), MAX_DECODED_BYTES)?;
    // An orientation that cannot be read is none: the pixels are still good.
    let orientation = decoder.orientation().unwrap_or(image::metadata::Orientation::NoTransforms);
    Ok((DynamicImage::from_decoder(decoder).map_err(damaged(format))?, orientation))
}

/// Walks a JPEG's markers: refuses one that ends before its end-of-image marker, which the decoder would fill with
/// grey, and one with too many scans.
fn check_jpeg_scans(bytes: &[u8]) -> Result<(), VisionError> {
    let cut = || VisionError::Decode { format: "JPEG", reason: "the file ends before its end-of-image marker".into() };
    let mut scans = 0;
    let mut at = 2;
    loop {
        let marker = loop {
            match bytes.get(at..at + 2) {
                None => return Err(cut()),
                Some(&[0xff, m]) if m != 0 && m != 0xff => break m,
                Some(_) => at += 1,
            }
        };
        at += 2;
        match marker {
            0xd9 => return Ok(()),
            // Restart markers and TEM stand alone.
            0x01 | 0xd0..=0xd8 => continue,
            0xda => {
                scans += 1;
                within("JPEG scans:", scans, MAX_JPEG_SCANS)?;
            }
            _ => {}
        }
        let Some(&[high, low]) = bytes.get(at..at + 2) else { return Err(cut()) };
        at += usize::from(u16::from_be_bytes([high, low])).max(2);
    }
}

/// Walks a GIF's blocks and counts its frames; refuses a frame of too many pixels, for which the decoder would make room however
/// small the picture is. What is damaged otherwise is left to the decoder.
fn check_gif_frames(bytes: &[u8]) -> Result<usize, VisionError> {
    let color_table = |flags: u8| if flags & 0x80 != 0 { 3 << ((flags & 7) + 1) } else { 0 };
    // Data comes in sub-blocks, each with its length in front, up to one of length 0.
    let past_data = |mut at: usize| loop {
        match bytes.get(at) {
            None => return at,
            Some(0) => return at + 1,
            Some(&length) => at += 1 + usize::from(length),
        }
    };
    let mut frames = 0;
    let mut at = 13 + bytes.get(10).map_or(0, |&flags| color_table(flags));
    loop {
        match bytes.get(at) {
            Some(0x21) => at = past_data(at + 2),
            Some(0x2c) => {
                let Some(&[_, _, _, _, w0, w1, h0, h1, flags]) = bytes.get(at + 1..at + 10) else { return Ok(frames) };
                let (width, height) = (u16::from_le_bytes([w0, w1]), u16::from_le_bytes([h0, h1]));
                within("pixels of a GIF frame:", u64::from(width) * u64::from(height), MAX_PIXELS)?;
                frames += 1;
                at = past_data(at + 10 + color_table(flags) + 1);
            }
            _ => return Ok(frames),
        }
    }
}

/// Flattens any kind of picture to RGB bytes.
fn over_white(image: DynamicImage) -> Vec<u8> {
    // The rounding of Pillow's `paste` with a mask.
    let blend = |value: u8, alpha: u8| {
        let sum = u32::from(value) * u32::from(alpha) + 255 * (255 - u32::from(alpha)) + 128;
        (((sum >> 8) + sum) >> 8) as u8
    };
    let high = |v: u16| (v >> 8) as u8;
    match image {
        DynamicImage::ImageRgb8(image) => image.into_raw(),
        DynamicImage::ImageLuma8(image) => image.into_raw().into_iter().flat_map(|v| [v; 3]).collect(),
        DynamicImage::ImageLumaA8(image) => image.pixels().flat_map(|p| [blend(p[0], p[1]); 3]).collect(),
        DynamicImage::ImageRgba8(image) => {
            image.pixels().flat_map(|p| [blend(p[0], p[3]), blend(p[1], p[3]), blend(p[2], p[3])]).collect()
        }
        DynamicImage::ImageLuma16(image) => image.pixels().flat_map(|p| [high(p[0]); 3]).collect(),
        DynamicImage::ImageLumaA16(image) => image.pixels().flat_map(|p| [blend(high(p[0]), high(p[1])); 3]).collect(),
        DynamicImage::ImageRgb16(image) => image.pixels().flat_map(|p| p.0.map(high)).collect(),
        DynamicImage::ImageRgba16(image) => {
            image.pixels().flat_map(|p| [0, 1, 2].map(|c| blend(high(p[c]), high(p[3])))).collect()
        }
        other => other.to_rgb8().into_raw(),
    }
}

/// What the bytes look like, for an error message.
fn describe(bytes: &[u8], format: Option<ImageFormat>) -> String {
    let starts = |magic: &[u8]| bytes.starts_with(magic);
    let known = match format {
        Some(format) => format!("{format:?}").to_uppercase(),
        None if starts(b"<svg") || starts(b"<?xml") => "SVG or XML".into(),
        None if starts(b"<!DOCTYPE") || starts(b"<html") => "an HTML page".into(),
        None if starts(b"%PDF") => "PDF".into(),
        None if bytes.get(4..8) == Some(b"ftyp") => "HEIC, AVIF or MP4".into(),
        None => {
            let head: Vec<String> = bytes.iter().take(8).map(|b| format!("{b:02x}")).collect();
            return format!("{} bytes that start with {}", bytes.len(), head.join(" "));
        }
    };
    format!("it looks like {known}")
}
