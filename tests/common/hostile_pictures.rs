//! Broken and hostile pictures, made from the good ones of tests/golden/vision. Shared by the tests of the decoder and those of
//! the server.

/// A picture of tests/golden/vision.
pub fn golden(name: &str) -> Vec<u8> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    // The crate's folder is the repository or lies two levels below it.
    let root =
        root.ancestors().find(|folder| folder.join("tests/golden/vision").is_dir()).expect("the goldens are there");
    let path = root.join("tests/golden/vision/pictures").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A PNG chunk with its checksum.
fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let mut out = (data.len() as u32).to_be_bytes().to_vec();
    out.extend_from_slice(kind);
    out.extend_from_slice(data);
    let mut crc = u32::MAX;
    for &byte in &out[4..] {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 };
        }
    }
    out.extend_from_slice(&(!crc).to_be_bytes());
    out
}

/// A PNG of the given header and image data.
pub fn png(width: u32, height: u32, depth: u8, colour: u8, data: &[u8]) -> Vec<u8> {
    let mut header = width.to_be_bytes().to_vec();
    header.extend_from_slice(&height.to_be_bytes());
    header.extend_from_slice(&[depth, colour, 0, 0, 0]);
    [b"\x89PNG\r\n\x1a\n".to_vec(), chunk(b"IHDR", &header), chunk(b"IDAT", data), chunk(b"IEND", &[])].concat()
}

/// A zlib stream of `len` zero bytes in stored blocks.
pub fn stored_zeros(len: usize) -> Vec<u8> {
    let mut out = vec![0x78, 0x01];
    let mut left = len;
    loop {
        let n = left.min(65_535);
        left -= n;
        out.push(u8::from(left == 0));
        out.extend_from_slice(&(n as u16).to_le_bytes());
        out.extend_from_slice(&(!(n as u16)).to_le_bytes());
        out.resize(out.len() + n, 0);
        if left == 0 {
            break;
        }
    }
    // Adler-32 of zeros: a stays 1, b counts the bytes.
    out.extend_from_slice(&(((len % 65_521) as u32) << 16 | 1).to_be_bytes());
    out
}

fn patched(name: &str, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut data = golden(name);
    data[at..at + bytes.len()].copy_from_slice(bytes);
    data
}

/// Where `needle` first lies in `data`.
fn find(data: &[u8], needle: &[u8]) -> usize {
    data.windows(needle.len()).position(|w| w == needle).expect("the golden has it")
}

/// A JPEG with `copies` of its first scan.
fn repeated_scans(copies: usize) -> Vec<u8> {
    let data = golden("photo.jpg");
    let scan = find(&data, &[0xff, 0xda]);
    let end = data.len() - 2;
    [&data[..scan], &data[scan..end].repeat(copies), &data[end..]].concat()
}

fn jpeg_size(width: u16, height: u16) -> Vec<u8> {
    let data = golden("photo.jpg");
    let frame = find(&data, &[0xff, 0xc0]);
    let size = [height.to_be_bytes(), width.to_be_bytes()].concat();
    patched("photo.jpg", frame + 5, &size)
}

pub fn bmp(width: i32, height: i32, bits: u16, compression: u32, data: &[u8]) -> Vec<u8> {
    let mut out = b"BM".to_vec();
    out.extend_from_slice(&(54 + data.len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&54u32.to_le_bytes());
    out.extend_from_slice(&40u32.to_le_bytes());
    out.extend_from_slice(&width.to_le_bytes());
    out.extend_from_slice(&height.to_le_bytes());
    out.extend_from_slice(&1u16.to_le_bytes());
    out.extend_from_slice(&bits.to_le_bytes());
    out.extend_from_slice(&compression.to_le_bytes());
    out.extend_from_slice(&[0; 20]);
    out.extend_from_slice(data);
    out
}

/// A GIF of 4 x 4 pixels with one frame of `side` x `side`.
fn gif_frame(side: u16) -> Vec<u8> {
    let side = side.to_le_bytes();
    let frame = [&[0x2c, 0, 0, 0, 0][..], &side, &side, &[0, 2, 2, 0x4c, 1, 0, 0x3b]].concat();
    [&b"GIF89a\x04\0\x04\0\x80\0\0\0\0\0\xff\xff\xff"[..], &frame].concat()
}

/// Pictures that must be refused, each with words its error must contain.
pub fn refused() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let half = |name: &str| {
        let data = golden(name);
        data[..data.len() / 2].to_vec()
    };
    let gif = golden("still.gif");
    let mut riff_liar = golden("lossless.webp");
    riff_liar[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    riff_liar.truncate(60);
    vec![
        ("no bytes", vec![], "0 bytes"),
        ("one byte", vec![0x89], "not a picture"),
        ("zeros", vec![0; 4096], "not a picture"),
        ("text", b"hello, this is a picture, honestly".to_vec(), "not a picture"),
        ("HTML", b"<!DOCTYPE html><html></html>".to_vec(), "HTML"),
        ("SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>".to_vec(), "SVG"),
        ("PDF", b"%PDF-1.7\n".to_vec(), "PDF"),
        ("HEIC", b"\0\0\0\x18ftypheic\0\0\0\0".to_vec(), "not a picture"),
        ("TIFF", b"II*\0\x08\0\0\0\0\0\0\0\0\0".to_vec(), "TIFF"),
        ("PNG signature alone", b"\x89PNG\r\n\x1a\n".to_vec(), "PNG"),
        ("PNG cut short", half("large.png"), "PNG"),
        ("PNG with a wrong checksum", patched("rgb.png", 29, &[0, 0, 0, 0]), "PNG"),
        ("PNG of 0 pixels", png(0, 10, 8, 2, &stored_zeros(10)), "PNG"),
        ("PNG of 2^31 x 2^31", png(1 << 31, 1 << 31, 8, 2, &stored_zeros(10)), ""),
        ("PNG of 100,000 x 100,000", png(100_000, 100_000, 8, 2, &stored_zeros(10)), "at most"),
        ("PNG of 16,000 x 16,000 in 60 bytes", png(16_000, 16_000, 8, 2, &stored_zeros(10)), "at most"),
        ("PNG of 8,000 x 8,000 x 16-bit RGBA with no data", png(8_000, 8_000, 16, 6, &stored_zeros(10)), "PNG"),
        ("PNG with less data than its size", png(64, 64, 8, 2, &stored_zeros(100)), "PNG"),
        ("PNG of an unknown colour type", png(4, 4, 8, 5, &stored_zeros(52)), "PNG"),
        ("PNG palette without a palette", png(4, 4, 8, 3, &stored_zeros(20)), "PNG"),
        ("PNG with garbage data", png(64, 64, 8, 2, &[0xde, 0xad, 0xbe, 0xef].repeat(64)), "PNG"),
        ("PNG 1 x 5000", png(1, 5000, 8, 0, &stored_zeros(10_000)), "ratio is 5000"),
        ("PNG 5000 x 1", png(5000, 1, 8, 0, &stored_zeros(5001)), "ratio is 5000"),
        ("JPEG start alone", vec![0xff, 0xd8, 0xff], "JPEG"),
        ("JPEG cut in its header", golden("photo.jpg")[..300].to_vec(), "JPEG"),
        ("JPEG cut in its scan", half("photo.jpg"), "end-of-image"),
        ("JPEG without a scan", vec![0xff, 0xd8, 0xff, 0xd9], "JPEG"),
        ("JPEG of 65,535 x 65,535", jpeg_size(65_535, 65_535), "at most"),
        ("JPEG of 0 pixels", jpeg_size(0, 0), "JPEG"),
        ("JPEG with 5,000 scans", repeated_scans(5_000), "scans"),
        ("WebP cut short", half("lossless.webp"), "WebP"),
        ("lossy WebP cut short", half("lossy.webp"), "WebP"),
        ("WebP that lies about its length", riff_liar, "WebP"),
        ("GIF header alone", b"GIF89a".to_vec(), "GIF"),
        ("GIF without a frame", [&gif[..13], b";"].concat(), "GIF"),
        ("GIF cut short", gif[..gif.len() / 3].to_vec(), "GIF"),
        ("GIF of 65,535 x 65,535", patched("still.gif", 6, &[0xff; 4]), "at most"),
        ("GIF with a frame of 65,535 x 65,535", gif_frame(0xffff), "at most"),
        ("GIF with a frame of 30,000 x 30,000", gif_frame(30_000), "at most"),
        ("BMP header alone", b"BM\0\0\0\0\0\0\0\0".to_vec(), "BMP"),
        ("BMP of 2 billion pixels a side", bmp(i32::MAX, i32::MAX, 24, 0, &[]), ""),
        ("BMP of negative width", bmp(-5, 5, 24, 0, &[0; 80]), "BMP"),
        ("BMP of 17 bits", bmp(4, 4, 17, 0, &[0; 64]), "BMP"),
        ("BMP with no pixels in it", bmp(64, 64, 24, 0, &[]), "BMP"),
    ]
}
