//! A reader over bytes that knows what it is reading, so that every error names the field and its place.

use super::GgufError;

/// Reads little-endian values from a byte slice. `field` describes what is being read; it is only formatted on error.
pub(super) struct Cursor<'a> {
    pub file: &'a str,
    pub data: &'a [u8],
    pub at: usize,
}

/// A length-like field could not be read: how the caller names it. A closure so that the happy path formats nothing.
pub(super) type Field<'f> = &'f dyn Fn() -> String;

impl<'a> Cursor<'a> {
    pub fn left(&self) -> usize {
        self.data.len() - self.at
    }

    pub fn error(&self, field: Field, at: usize, expected: impl Into<String>, found: impl Into<String>) -> GgufError {
        GgufError::Malformed {
            file: self.file.to_string(),
            field: field(),
            offset: at as u64,
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize, field: Field) -> Result<&'a [u8], GgufError> {
        if len > self.left() {
            let found = format!("{} (the file is cut short or the length is wrong)", bytes_left(self.left()));
            return Err(self.error(field, self.at, format!("{len} bytes"), found));
        }
        let slice = &self.data[self.at..self.at + len];
        self.at += len;
        Ok(slice)
    }

    fn array<const N: usize>(&mut self, field: Field) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N, field)?);
        Ok(out)
    }

    pub fn u32(&mut self, field: Field) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub fn u64(&mut self, field: Field) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A count of things of at least `min_bytes` bytes each: refused when the rest of the file cannot hold them.
    pub fn count(&mut self, min_bytes: usize, field: Field) -> Result<usize, GgufError> {
        let at = self.at;
        let count = self.u64(field)?;
        let most = (self.left() / min_bytes) as u64;
        if count > most {
            let expected = format!("a count of at most {most} ({} left in the file)", bytes_left(self.left()));
            return Err(self.error(field, at, expected, count.to_string()));
        }
        Ok(count as usize)
    }

    /// A string of at most `most` bytes: its length as u64, then that many bytes of UTF-8.
    pub fn string(&mut self, most: usize, field: Field) -> Result<&'a str, GgufError> {
        let at = self.at;
        let length = || format!("length of {}", field());
        let len = self.count(1, &length)?;
        if len > most {
            return Err(self.error(&length, at, format!("at most {most} bytes"), len.to_string()));
        }
        let bytes = self.bytes(len, field)?;
        std::str::from_utf8(bytes).map_err(|e| {
            self.error(field, at, "UTF-8 text", format!("an invalid byte at place {} of it", e.valid_up_to()))
        })
    }
}

fn bytes_left(n: usize) -> String {
    if n == 1 { "1 byte".into() } else { format!("{n} bytes") }
}
