//! Little-endian numbers and lists with lengths that are checked against what is left before anything is allocated.

/// Why bytes cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Truncated;

/// Reads from a slice of bytes.
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Cursor { rest: bytes }
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], Truncated> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn byte(&mut self) -> Result<u8, Truncated> {
        Ok(self.take(1)?[0])
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Truncated> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    pub(crate) fn number(&mut self) -> Result<usize, Truncated> {
        let bytes = self.take(8)?.first_chunk::<8>().ok_or(Truncated)?;
        usize::try_from(u64::from_le_bytes(*bytes)).map_err(|_| Truncated)
    }

    /// Bytes after their length.
    pub(crate) fn blob(&mut self) -> Result<&'a [u8], Truncated> {
        let length = self.number()?;
        self.take(length)
    }

    /// 32-bit values after their number.
    pub(crate) fn words<V>(&mut self, value: impl Fn([u8; 4]) -> V) -> Result<Vec<V>, Truncated> {
        let count = self.number()?;
        let bytes = self.take(count.checked_mul(4).ok_or(Truncated)?)?;
        Ok(bytes.chunks_exact(4).map(|word| value([word[0], word[1], word[2], word[3]])).collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

pub(crate) fn put_number(to: &mut Vec<u8>, value: usize) {
    to.extend_from_slice(&(value as u64).to_le_bytes());
}

pub(crate) fn put_floats(to: &mut Vec<u8>, values: &[f32]) {
    put_number(to, values.len());
    values.iter().for_each(|value| to.extend_from_slice(&value.to_le_bytes()));
}

/// Writes bytes that come from `write`, with their length before them.
pub(crate) fn put_blob(
    to: &mut Vec<u8>,
    write: impl FnOnce(&mut Vec<u8>) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let at = to.len();
    put_number(to, 0);
    write(to)?;
    let length = (to.len() - at - 8) as u64;
    to[at..at + 8].copy_from_slice(&length.to_le_bytes());
    Ok(())
}
