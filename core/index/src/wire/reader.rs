//! A bounded walk over msgpack: reads, skips and checks, and never steps outside the payload.

use super::MAX_DEPTH;

/// The bytes are no msgpack, or not of the type that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

/// The start of a value: scalars whole, of others the length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Head {
    Nil,
    Bool,
    Int(i64),
    /// An integer above [`i64::MAX`].
    Large(u64),
    Float(f64),
    Str(u32),
    Bin(u32),
    Array(u32),
    Map(u32),
    Ext(i8, u32),
}

/// A value whose contents are checked as far as a generic decoder would check them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Any<'a> {
    Int(i64),
    /// An integer above [`i64::MAX`].
    Large(u64),
    Text(&'a str),
    Bytes(&'a [u8]),
    Array(u32),
    Other,
}

/// The bytes of one value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Raw<'a>(pub(super) &'a [u8]);

impl<'a> Raw<'a> {
    pub(super) fn reader(self) -> Reader<'a> {
        Reader::new(self.0)
    }

    pub(super) fn is_nil(self) -> bool {
        self.0.first() == Some(&0xc0)
    }

    /// An integer of 64 bits, unsigned by its first byte; `None` for anything else.
    #[inline]
    pub(super) fn u64(self) -> Option<u64> {
        match self.0.as_array::<9>() {
            Some([0xcf, value @ ..]) => Some(u64::from_be_bytes(*value)),
            _ => None,
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Reader<'a> {
    /// What is not read yet.
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    #[inline]
    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(Malformed)?;
        self.rest = rest;
        Ok(taken)
    }

    #[inline]
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(Malformed)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.bytes().map(u8::from_be_bytes)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.bytes().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.bytes().map(u32::from_be_bytes)
    }

    fn ext(&mut self, length: u32) -> Result<Head, Malformed> {
        Ok(Head::Ext(self.u8()?.cast_signed(), length))
    }

    /// Read the start of a value; the contents of strings, containers and extensions come next.
    pub(super) fn head(&mut self) -> Result<Head, Malformed> {
        Ok(match self.u8()? {
            byte @ 0x00..=0x7f => Head::Int(byte.into()),
            byte @ 0xe0..=0xff => Head::Int(byte.cast_signed().into()),
            byte @ 0x80..=0x8f => Head::Map((byte & 0x0f).into()),
            byte @ 0x90..=0x9f => Head::Array((byte & 0x0f).into()),
            byte @ 0xa0..=0xbf => Head::Str((byte & 0x1f).into()),
            0xc0 => Head::Nil,
            0xc1 => return Err(Malformed),
            0xc2 | 0xc3 => Head::Bool,
            0xc4 => Head::Bin(self.u8()?.into()),
            0xc5 => Head::Bin(self.u16()?.into()),
            0xc6 => Head::Bin(self.u32()?),
            0xc7 => {
                let length = self.u8()?.into();
                self.ext(length)?
            }
            0xc8 => {
                let length = self.u16()?.into();
                self.ext(length)?
            }
            0xc9 => {
                let length = self.u32()?;
                self.ext(length)?
            }
            0xca => Head::Float(f32::from_be_bytes(self.bytes()?).into()),
            0xcb => Head::Float(f64::from_be_bytes(self.bytes()?)),
            0xcc => Head::Int(self.u8()?.into()),
            0xcd => Head::Int(self.u16()?.into()),
            0xce => Head::Int(self.u32()?.into()),
            0xcf => {
                let value = u64::from_be_bytes(self.bytes()?);
                i64::try_from(value).map_or(Head::Large(value), Head::Int)
            }
            0xd0 => Head::Int(i8::from_be_bytes(self.bytes()?).into()),
            0xd1 => Head::Int(i16::from_be_bytes(self.bytes()?).into()),
            0xd2 => Head::Int(i32::from_be_bytes(self.bytes()?).into()),
            0xd3 => Head::Int(i64::from_be_bytes(self.bytes()?)),
            byte @ 0xd4..=0xd8 => self.ext(1 << (byte - 0xd4))?,
            0xd9 => Head::Str(self.u8()?.into()),
            0xda => Head::Str(self.u16()?.into()),
            0xdb => Head::Str(self.u32()?),
            0xdc => Head::Array(self.u16()?.into()),
            0xdd => Head::Array(self.u32()?),
            0xde => Head::Map(self.u16()?.into()),
            0xdf => Head::Map(self.u32()?),
        })
    }

    /// Read the start of a list: how many items come. Nothing is read where it is something else.
    #[inline]
    pub(super) fn array(&mut self) -> Result<u32, Malformed> {
        let (length, rest) = match *self.rest {
            [first @ 0x90..=0x9f, ref rest @ ..] => (u32::from(first & 0x0f), rest),
            [0xdc, a, b, ref rest @ ..] => (u32::from(u16::from_be_bytes([a, b])), rest),
            [0xdd, a, b, c, d, ref rest @ ..] => (u32::from_be_bytes([a, b, c, d]), rest),
            _ => return Err(Malformed),
        };
        self.rest = rest;
        Ok(length)
    }

    /// Let another function read. It works on a copy: so the compiler may keep this reader in registers.
    #[inline(always)]
    pub(super) fn lend(&mut self, read: impl FnOnce(&mut Self) -> Result<(), Malformed>) -> Result<(), Malformed> {
        let mut lent = self.clone();
        read(&mut lent)?;
        *self = lent;
        Ok(())
    }

    /// Read the start of a map: how many pairs come. Nothing is read where it is something else.
    #[inline]
    pub(super) fn map(&mut self) -> Result<u32, Malformed> {
        let (length, rest) = match *self.rest {
            [first @ 0x80..=0x8f, ref rest @ ..] => (u32::from(first & 0x0f), rest),
            [0xde, a, b, ref rest @ ..] => (u32::from(u16::from_be_bytes([a, b])), rest),
            [0xdf, a, b, c, d, ref rest @ ..] => (u32::from_be_bytes([a, b, c, d]), rest),
            _ => return Err(Malformed),
        };
        self.rest = rest;
        Ok(length)
    }

    /// Step over these bytes, if they are what comes next.
    #[inline(always)]
    pub(super) fn skips<const N: usize>(&mut self, expected: &[u8; N]) -> bool {
        match self.rest.split_first_chunk() {
            Some((bytes, rest)) if bytes == expected => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    /// Step over one value and return its bytes; only the structure is checked.
    #[inline]
    pub(super) fn raw(&mut self) -> Result<Raw<'a>, Malformed> {
        self.raw_within(MAX_DEPTH)
    }

    /// The same for a value that may be nested so deeply.
    #[inline]
    pub(super) fn raw_within(&mut self, depth: u32) -> Result<Raw<'a>, Malformed> {
        let before = self.rest;
        let size = usize::from(SIZES[usize::from(*before.first().ok_or(Malformed)?)]);
        if size > 0 {
            return self.take(size).map(Raw);
        }
        self.lend(|reader| reader.skip_long(depth))?;
        Ok(Raw(&before[..before.len() - self.rest.len()]))
    }

    /// Step over so many values, which may be nested so deeply each.
    pub(super) fn skip_many(&mut self, count: u64, depth: u32) -> Result<(), Malformed> {
        let mut rest = self.rest;
        for _ in 0..count {
            let first = rest.first().ok_or(Malformed)?;
            let size = SIZES[usize::from(*first)];
            if size == 0 {
                self.rest = rest;
                self.skip_long(depth)?;
                rest = self.rest;
            } else {
                rest = rest.get(usize::from(size)..).ok_or(Malformed)?;
            }
        }
        self.rest = rest;
        Ok(())
    }

    /// Step over a value whose size its first byte does not tell.
    fn skip_long(&mut self, depth: u32) -> Result<(), Malformed> {
        let items = match self.head()? {
            Head::Str(length) | Head::Bin(length) | Head::Ext(_, length) => {
                return self.take(length as usize).map(drop);
            }
            Head::Array(length) => u64::from(length),
            Head::Map(length) => 2 * u64::from(length),
            Head::Nil | Head::Bool | Head::Int(_) | Head::Large(_) | Head::Float(_) => 0,
        };
        if items == 0 { Ok(()) } else { self.skip_many(items, depth.checked_sub(1).ok_or(Malformed)?) }
    }

    /// A string, and nothing else.
    #[inline]
    pub(super) fn text(&mut self) -> Result<&'a str, Malformed> {
        let bytes = self.string(0)?.ok_or(Malformed)?;
        std::str::from_utf8(bytes).map_err(|_| Malformed)
    }

    /// The bytes of a string, which may be no UTF-8; `None` for anything else, nested so deeply at most, stepped over.
    #[inline]
    pub(super) fn string(&mut self, depth: u32) -> Result<Option<&'a [u8]>, Malformed> {
        if let Some((first @ 0xa0..=0xbf, rest)) = self.rest.split_first()
            && let Some((bytes, rest)) = rest.split_at_checked(usize::from(first & 0x1f))
        {
            self.rest = rest;
            return Ok(Some(bytes));
        }
        self.long_string(depth)
    }

    fn long_string(&mut self, depth: u32) -> Result<Option<&'a [u8]>, Malformed> {
        let mut string = self.clone();
        let Head::Str(length) = string.head()? else {
            return self.raw_within(depth).map(|_| None);
        };
        let bytes = string.take(length as usize)?;
        *self = string;
        Ok(Some(bytes))
    }

    fn utf8(&mut self, length: u32) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.take(length as usize)?).map_err(|_| Malformed)
    }

    /// An integer or nil.
    #[inline]
    pub(super) fn optional_int(&mut self) -> Option<Option<i128>> {
        if let [small @ ..=0x7f] = self.rest {
            return Some(Some((*small).into()));
        }
        match self.head().ok()? {
            Head::Nil => Some(None),
            Head::Int(value) => Some(Some(value.into())),
            Head::Large(value) => Some(Some(value.into())),
            _ => None,
        }
    }

    /// An integer or a float.
    #[inline]
    pub(super) fn number(&mut self) -> Option<f64> {
        if let Some(([0xcb, value @ ..], _)) = self.rest.split_first_chunk::<9>() {
            return Some(f64::from_be_bytes(*value));
        }
        match self.head().ok()? {
            Head::Int(value) => Some(value as f64),
            Head::Large(value) => Some(value as f64),
            Head::Float(value) => Some(value),
            _ => None,
        }
    }

    /// A list of integers above 2³² − 1 alone, as lists of hashes nearly always are. Nothing is read where it is not.
    #[inline]
    pub(super) fn u64s(&mut self) -> Option<impl Iterator<Item = u64> + use<'a>> {
        let mut list = self.clone();
        let length = list.array().ok()?;
        let (items, rest) = list.rest.split_at_checked(9 * length as usize)?;
        let (items, _) = items.as_chunks::<9>();
        if !items.iter().all(|item| item[0] == 0xcf) {
            return None;
        }
        self.rest = rest;
        Some(items.iter().map(|[_, value @ ..]| u64::from_be_bytes(*value)))
    }

    /// A list of nils alone: how many. Nothing is read where it is something else.
    #[inline]
    pub(super) fn nils(&mut self) -> Option<u32> {
        let mut list = self.clone();
        let count = list.array().ok()?;
        let nils = list.take(count as usize).ok()?;
        if nils.iter().any(|byte| *byte != 0xc0) {
            return None;
        }
        *self = list;
        Some(count)
    }

    /// A list of unsigned 32-bit integers; nil is none. Nothing is read where it is something else.
    pub(super) fn u32s(&mut self) -> Result<Option<Vec<u32>>, Malformed> {
        let mut list = self.clone();
        let values = list.read_u32s()?;
        *self = list;
        Ok(values)
    }

    fn read_u32s(&mut self) -> Result<Option<Vec<u32>>, Malformed> {
        if self.skips(&[0xc0]) {
            return Ok(None);
        }
        let length = self.array()? as usize;
        if length > self.rest.len() {
            return Err(Malformed);
        }
        let mut values = Vec::with_capacity(length);
        while length - values.len() >= SOME && self.some_u32s(&mut values) {}
        while values.len() < length {
            let Head::Int(value) = self.head()? else {
                return Err(Malformed);
            };
            values.push(u32::try_from(value).map_err(|_| Malformed)?);
        }
        Ok(Some(values))
    }

    /// The next integers, if so many are of 8, 16 or 32 bits, and the payload does not end soon; else false, and nothing.
    #[inline]
    fn some_u32s(&mut self, values: &mut Vec<u32>) -> bool {
        // A window with room for all of them: so that one check of its length is enough. The mask changes nothing, but
        // tells the compiler so.
        const MASK: usize = 127;
        const { assert!(5 * SOME <= MASK) };
        let Some(window) = self.rest.first_chunk::<{ MASK + 5 }>() else {
            return false;
        };
        let mut at = 0;
        let mut some = [0; SOME];
        for value in &mut some {
            let start = at & MASK;
            let first = window[start];
            if matches!(first, 0xcc..=0xce) {
                // without a branch between the widths, since in a list of tokens it can't be predicted
                let wide = [window[start + 1], window[start + 2], window[start + 3], window[start + 4]];
                *value = u32::from_be_bytes(wide) >> SHIFTS[usize::from(first & 3)];
                at += 1 + int_bytes(first);
            } else if first < 0x80 {
                *value = first.into();
                at += 1;
            } else {
                return false;
            }
        }
        values.extend_from_slice(&some);
        self.rest = &self.rest[at..];
        true
    }

    /// Any value, its contents checked: UTF-8, timestamps, map keys.
    pub(super) fn any(&mut self) -> Result<Any<'a>, Malformed> {
        self.checked(MAX_DEPTH, false)
    }

    /// `as_key`: inside a map's key, where only what can be hashed may stand (no map, no unknown extension).
    fn checked(&mut self, depth: u32, as_key: bool) -> Result<Any<'a>, Malformed> {
        Ok(match self.head()? {
            Head::Int(value) => Any::Int(value),
            Head::Large(value) => Any::Large(value),
            Head::Str(length) => Any::Text(self.utf8(length)?),
            Head::Bin(length) => Any::Bytes(self.take(length as usize)?),
            Head::Nil | Head::Bool | Head::Float(_) => Any::Other,
            Head::Array(length) => {
                let depth = depth.checked_sub(1).ok_or(Malformed)?;
                for _ in 0..length {
                    self.checked(depth, as_key)?;
                }
                Any::Array(length)
            }
            Head::Map(_) if as_key => return Err(Malformed),
            Head::Map(length) => {
                let depth = depth.checked_sub(1).ok_or(Malformed)?;
                for _ in 0..length {
                    self.checked(depth, true)?;
                    self.checked(depth, false)?;
                }
                Any::Other
            }
            Head::Ext(kind, length) => {
                let body = self.take(length as usize)?;
                match kind {
                    -1 if !is_timestamp(body) => return Err(Malformed),
                    -1 => Any::Other,
                    _ if as_key => return Err(Malformed),
                    _ => Any::Other,
                }
            }
        })
    }
}

/// Integers that are read at a time.
const SOME: usize = 16;

/// By how much an integer of 8, 16 or 32 bits is to be shifted right where 32 are read, by the last bits of its first byte.
const SHIFTS: [u8; 4] = [24, 16, 0, 0];

/// Bytes of a value whose first byte tells them: of all but long strings, containers with something in them, and what is
/// no msgpack. 0: of those.
const SIZES: [u8; 256] = {
    let mut sizes = [0; 256];
    let mut first = 0;
    while first < sizes.len() {
        sizes[first] = match first {
            0x00..=0x80 | 0x90 | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => 1,
            0xa0..=0xbf => 1 + (first as u8 & 0x1f),
            0xca => 5,
            0xcb => 9,
            0xcc..=0xd3 => 1 + int_bytes(first as u8) as u8,
            0xd4..=0xd8 => 2 + (1 << (first - 0xd4)),
            _ => 0,
        };
        first += 1;
    }
    sizes
};

/// How many bytes follow the first byte (0xcc to 0xd3) of an integer.
const fn int_bytes(first: u8) -> usize {
    1 << (first & 3)
}

/// A msgpack timestamp of the years 1 to 9999, as the reference's decoder takes it (it rounds to microseconds).
fn is_timestamp(body: &[u8]) -> bool {
    const FIRST: i64 = -62_135_596_800;
    const LAST: i64 = 253_402_300_799;
    let (seconds, nanoseconds) = match *body {
        [_, _, _, _] => return true,
        [a, b, c, d, e, f, g, h] => {
            let both = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
            ((both & ((1 << 34) - 1)).cast_signed(), (both >> 34) as u32)
        }
        [n0, n1, n2, n3, a, b, c, d, e, f, g, h] => {
            (i64::from_be_bytes([a, b, c, d, e, f, g, h]), u32::from_be_bytes([n0, n1, n2, n3]))
        }
        _ => return false,
    };
    nanoseconds <= 999_999_999 && (FIRST..=LAST).contains(&seconds) && (seconds < LAST || nanoseconds < 999_999_500)
}
