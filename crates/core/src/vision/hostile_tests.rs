//! Broken and hostile pictures: every one is refused with an error that says what is wrong, quickly and without large
//! allocations, or read as what it is. None panics.

use super::decode::{MAX_FILE_BYTES, decode};
use super::preprocess::{PictureGeometry, PreprocessOptions, preprocess};
use super::{Preprocessed, VisionError};
use std::time::{Duration, Instant};

#[path = "../../../../tests/common/hostile_pictures.rs"]
mod pictures;

use pictures::{bmp, golden, png, refused, stored_zeros};

/// Far above what any of these takes, far below what an unbounded decoder would take.
const TIME_LIMIT: Duration = Duration::from_secs(20);

fn read(bytes: &[u8]) -> Result<Preprocessed, VisionError> {
    let geometry = PictureGeometry { patch: 16, merge: 2, mean: [0.5; 3], std: [0.5; 3] };
    preprocess(bytes, &geometry, &PreprocessOptions { max_tokens: 64, min_tokens: 4 }, &[0; 32])
}

#[test]
fn broken_and_hostile_pictures_are_refused_with_a_reason() {
    let cases = refused();
    assert!(cases.len() >= 30);
    for (name, bytes, reason) in cases {
        let start = Instant::now();
        match read(&bytes) {
            Ok(made) => panic!("{name}: was read as a picture of {:?}", made.source_size),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(reason), "{name}: {text:?} does not say {reason:?}");
                assert!(!text.contains("panic"), "{name}: {text}");
            }
        }
        assert!(start.elapsed() < TIME_LIMIT, "{name} took {:?}", start.elapsed());
    }
}

#[test]
fn a_file_over_the_limit_is_refused_unread() {
    let mut big = golden("rgb.png");
    big.resize(MAX_FILE_BYTES as usize + 1, 0);
    assert!(matches!(read(&big), Err(VisionError::TooLarge { .. })));
}

#[test]
fn odd_but_honest_pictures_are_read() {
    let cases = [
        ("1 x 1", png(1, 1, 8, 0, &stored_zeros(2)), (1, 1)),
        ("1 bit deep", png(9, 9, 1, 0, &stored_zeros(27)), (9, 9)),
        ("1 x 200", png(1, 200, 8, 0, &stored_zeros(400)), (1, 200)),
        ("upside down BMP", bmp(4, -4, 24, 0, &[9; 48]), (4, 4)),
        ("PNG with bytes after its end", [golden("rgb.png"), vec![7; 1000]].concat(), (100, 75)),
        ("JPEG with bytes after its end", [golden("photo.jpg"), vec![7; 1000]].concat(), (160, 120)),
    ];
    for (name, bytes, size) in cases {
        let made = read(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(made.source_size, size, "{name}");
    }
}

#[test]
fn no_flipped_byte_panics() {
    for name in
        ["rgb.png", "chroma.jpg", "lossless.webp", "lossy.webp", "still.gif", "moving.gif", "rgb.bmp", "turned.png"]
    {
        let good = golden(name);
        let mut state = 1u32;
        for _ in 0..60 {
            let mut bytes = good.clone();
            for _ in 0..3 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let at = state as usize % bytes.len();
                bytes[at] ^= (state >> 24) as u8 | 1;
            }
            // Damage that a format cannot notice gives a picture, all other damage an error.
            let _ = decode(&bytes);
        }
    }
}
