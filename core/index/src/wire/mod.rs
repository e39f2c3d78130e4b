//! msgpack payload → events, for every dialect of vLLM's publisher from 0.9 on.
//!
//! What must always hold:
//!
//! * One bad event costs that event, never its batch; a payload that is no batch is a [`BatchError`], whatever the bytes.
//! * Lengths that a payload declares are never trusted: nothing is allocated that the payload does not back with bytes,
//!   and no more than [`AHEAD`] events are there at a time, so that a payload of many tiny ones costs no memory either.
//! * Nothing is guessed: a field of the wrong type makes a skipped event that says so.
//!
//! The batch is an array `[ts, events, data_parallel_rank?]` (a map with the same names is taken too). Events are arrays
//! with positional fields up to vLLM 0.23 and maps from 0.24 on; both may be mixed. Shorter and longer arrays and unknown
//! map keys are fine. The structure of the whole payload is checked before its first event is given out; the first events
//! are decoded on that way already, which spares most payloads a second one.

mod event;
mod reader;

use std::vec;

use crate::event::Event;
use reader::{Malformed, Raw, Reader};

/// Bytes; a larger payload is refused unread.
pub const MAX_PAYLOAD: usize = 16 << 20;

/// Of a batch; one with more is refused.
pub const MAX_EVENTS: u32 = 1 << 18;

/// Hashes of a batch; one with more is refused, because lookups wait while a batch is applied. A step of an engine stores
/// and evicts a few thousand blocks at most.
pub const MAX_HASHES: usize = 1 << 17;

/// KV-cache groups of one engine. Models have a handful, and never more than layers; a removal that names none of them
/// is for all.
pub const MAX_GROUPS: i64 = 256;

/// The deepest nesting that is read; the real dialects have six levels.
pub const MAX_DEPTH: u32 = 512;

/// Events that are decoded at a time: the first ones while the structure is checked; those behind are stepped over then.
const AHEAD: u32 = 64;

/// Why a payload is no batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchError {
    /// More than [`MAX_PAYLOAD`] bytes, [`MAX_EVENTS`] events or [`MAX_HASHES`] hashes.
    TooLarge,
    /// Empty, cut short, malformed, nested too deeply, or followed by something else.
    NotMsgpack,
    /// Neither array nor map.
    NotABatch,
    /// No timestamp or no events.
    MissingField,
    /// Timestamp, events or rank of the wrong type.
    WrongType,
}

impl From<Malformed> for BatchError {
    fn from(_: Malformed) -> Self {
        Self::NotMsgpack
    }
}

/// A batch whose structure is sound; iterate to decode its events.
#[derive(Debug, Clone)]
pub struct Batch<'a> {
    /// The engine's clock when it published the batch, in seconds.
    pub ts: f64,
    /// The data-parallel rank, where the batch says it.
    pub rank: Option<i128>,
    events: Events<'a>,
}

impl<'a> Batch<'a> {
    /// Read a payload's frame and check its structure.
    ///
    /// # Errors
    /// [`BatchError`] when it is not an event batch.
    pub fn decode(payload: &'a [u8]) -> Result<Self, BatchError> {
        if payload.len() > MAX_PAYLOAD {
            return Err(BatchError::TooLarge);
        }
        let fields = Fields::read(payload)?;
        let (Some(ts), Some(events)) = (fields.ts, fields.events) else {
            return Err(BatchError::MissingField);
        };
        let ts = ts.reader().number().ok_or(BatchError::WrongType)?;
        let events = events.ok_or(BatchError::WrongType)?;
        if events.decoded.len() as u64 + u64::from(events.left) > MAX_EVENTS.into() {
            return Err(BatchError::TooLarge);
        }
        let rank = match fields.rank {
            Some(raw) => raw.reader().optional_int().ok_or(BatchError::WrongType)?,
            None => None,
        };
        let batch = Self { ts, rank, events };
        if payload.len() > MAX_HASHES && batch.has_too_many_hashes() {
            return Err(BatchError::TooLarge);
        }
        Ok(batch)
    }

    /// Counts them, which a payload of fewer bytes can do without.
    fn has_too_many_hashes(&self) -> bool {
        let decoded = self.events.decoded.as_slice().iter().map(|event| event.hashes().len());
        let mut behind = Events::at(&self.events.behind, self.events.left);
        let behind = std::iter::from_fn(|| behind.next()).map(|event| event.hashes().len());
        decoded.chain(behind).try_fold(MAX_HASHES, usize::checked_sub).is_none()
    }
}

impl<'a> Iterator for Batch<'a> {
    type Item = Event<'a>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.events.next()
    }
}

/// The events of a batch.
#[derive(Debug, Clone)]
struct Events<'a> {
    decoded: vec::IntoIter<Event<'a>>,
    /// How many come behind those, and where.
    left: u32,
    behind: Reader<'a>,
}

impl<'a> Events<'a> {
    /// So many, none of them decoded yet.
    fn at(reader: &Reader<'a>, count: u32) -> Self {
        Self { decoded: Vec::new().into_iter(), left: count, behind: reader.clone() }
    }

    /// Read a list of events; `None` for any other value.
    fn read(reader: &mut Reader<'a>) -> Result<Option<Self>, Malformed> {
        if !matches!(reader.peek(), Some(0x90..=0x9f | 0xdc | 0xdd)) {
            return reader.raw().map(|_| None);
        }
        let left = reader.array()?;
        let mut events = Self::at(reader, left);
        events.decode(reader)?;
        events.behind = reader.clone();
        reader.skip_many(events.left.into(), MAX_DEPTH - 1)?;
        Ok(Some(events))
    }

    /// Decode the next ones, at which the reader stands.
    fn decode(&mut self, reader: &mut Reader<'a>) -> Result<(), Malformed> {
        let count = self.left.min(AHEAD);
        let mut events = Vec::with_capacity(count as usize);
        for _ in 0..count {
            event::decode(reader, &mut events)?;
        }
        self.decoded = events.into_iter();
        self.left -= count;
        Ok(())
    }

    #[inline]
    fn next(&mut self) -> Option<Event<'a>> {
        if self.decoded.as_slice().is_empty() && self.left > 0 {
            let mut behind = self.behind.clone();
            self.decode(&mut behind).ok()?;
            self.behind = behind;
        }
        self.decoded.next()
    }
}

#[derive(Default)]
struct Fields<'a> {
    ts: Option<Raw<'a>>,
    /// Present, and a list.
    events: Option<Option<Events<'a>>>,
    rank: Option<Raw<'a>>,
}

impl<'a> Fields<'a> {
    fn read(payload: &'a [u8]) -> Result<Self, BatchError> {
        let mut reader = Reader::new(payload);
        let mut fields = Self::default();
        match payload.first() {
            None => return Err(BatchError::NotMsgpack),
            Some(0x90..=0x9f | 0xdc | 0xdd) => {
                for at in 0..reader.array()? {
                    match at {
                        0 => fields.ts = Some(reader.raw()?),
                        1 => fields.events = Some(Events::read(&mut reader)?),
                        2 => fields.rank = Some(reader.raw()?),
                        _ => drop(reader.raw()?),
                    }
                }
            }
            Some(0x80..=0x8f | 0xde | 0xdf) => {
                for _ in 0..reader.map()? {
                    match reader.text()? {
                        "ts" => fields.ts = Some(reader.raw()?),
                        "events" => fields.events = Some(Events::read(&mut reader)?),
                        "data_parallel_rank" => fields.rank = Some(reader.raw()?),
                        _ => drop(reader.raw()?),
                    }
                }
            }
            Some(_) => return Err(BatchError::NotABatch),
        }
        if reader.is_at_end() { Ok(fields) } else { Err(BatchError::NotMsgpack) }
    }
}

#[cfg(test)]
mod tests;
