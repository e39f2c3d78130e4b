//! One event: split into its fields first, so that the reader stands behind it whatever is wrong with it.

use std::borrow::Cow;

use super::reader::{Any, Head, Malformed, Raw, Reader};
use super::{MAX_DEPTH, MAX_GROUPS};
use crate::event::{Adapter, EngineHash, Event, ExtraKey, Removed, Run, SkipReason, Stored, Tier};
use crate::hits::Kind;

// The fields that matter, in the order of BlockStored's array form (positions 1 to 11); those behind come in maps only.
const HASHES: usize = 0;
const PARENT: usize = 1;
const TOKENS: usize = 2;
const BLOCK_SIZE: usize = 3;
const LORA_ID: usize = 4;
const MEDIUM: usize = 5;
const LORA_NAME: usize = 6;
const EXTRA_KEYS: usize = 7;
const GROUP: usize = 8;
const KIND: usize = 9;
const WINDOW: usize = 10;
const SESSION: usize = 11;
const REMAINING: usize = 12;
/// The tag of a map.
const TYPE: usize = 13;
const FIELDS: usize = 14;

const STORED_POSITIONS: [usize; 11] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
const REMOVED_POSITIONS: [usize; 3] = [HASHES, MEDIUM, GROUP];

fn field_of(name: &[u8]) -> Option<usize> {
    Some(match name.len() {
        4 if name == b"type" => TYPE,
        6 if name == b"medium" => MEDIUM,
        7 if name == b"lora_id" => LORA_ID,
        9 if name == b"token_ids" => TOKENS,
        9 if name == b"lora_name" => LORA_NAME,
        9 if name == b"group_idx" => GROUP,
        10 if name == b"block_size" => BLOCK_SIZE,
        10 if name == b"extra_keys" => EXTRA_KEYS,
        10 if name == b"session_id" => SESSION,
        12 if name == b"block_hashes" => HASHES,
        17 if name == b"parent_block_hash" => PARENT,
        18 if name == b"kv_cache_spec_kind" => KIND,
        21 if name == b"remaining_copy_counts" => REMAINING,
        28 if name == b"kv_cache_spec_sliding_window" => WINDOW,
        _ => return None,
    })
}

/// Of a field's value: the batch's list of events and the event are around it.
const VALUE_DEPTH: u32 = MAX_DEPTH - 2;

/// Raw values by field.
type Raws<'a> = [Option<Raw<'a>>; FIELDS];

/// Fields as they stand in the event.
#[derive(Default)]
struct Fields<'a> {
    raw: Raws<'a>,
    /// What can be read at once is: stepping over it first would cost as much again.
    tokens: Option<Result<Option<Vec<u32>>, Malformed>>,
    hashes: Option<Vec<EngineHash<'a>>>,
    /// Of so many blocks, none has extra keys.
    nils: Option<u32>,
}

impl<'a> Fields<'a> {
    /// Read an event that is an array. Returns its tag.
    fn take_array(&mut self, reader: &mut Reader<'a>) -> Result<Read<&'a str>, Malformed> {
        let length = reader.array()?;
        if length == 0 {
            return Ok(Err(SkipReason::NoTag));
        }
        let tag = tag_of(reader.raw_within(VALUE_DEPTH)?);
        let positions = if tag == Ok("BlockRemoved") { &REMOVED_POSITIONS[..] } else { &STORED_POSITIONS };
        let known = positions.len().min(length as usize - 1);
        for field in &positions[..known] {
            self.take(*field, reader)?;
        }
        reader.skip_many(u64::from(length) - 1 - known as u64, VALUE_DEPTH)?;
        Ok(tag)
    }

    /// Read an event that is a map. Returns its tag.
    fn take_map(&mut self, reader: &mut Reader<'a>) -> Result<Read<&'a str>, Malformed> {
        let length = reader.map()?;
        let left = self.take_in_order(length, reader)?;
        let mut names_are_text = true;
        for _ in 0..left {
            let name = reader.string(VALUE_DEPTH)?;
            if let Some(field) = name.and_then(field_of) {
                self.take(field, reader)?;
                continue;
            }
            reader.raw_within(VALUE_DEPTH)?;
            names_are_text &= name.is_some_and(|name| std::str::from_utf8(name).is_ok());
        }
        Ok(if names_are_text {
            self.raw[TYPE].ok_or(SkipReason::NoTag).and_then(tag_of)
        } else {
            Err(SkipReason::WrongType)
        })
    }

    /// Read the fields of a map of so many, as far as they come in the order in which engines send them (some or all).
    /// Returns how many are left: an order that is known costs less than looking at each name.
    fn take_in_order(&mut self, length: u32, given: &mut Reader<'a>) -> Result<u32, Malformed> {
        let mut left = length;
        let reader = &mut given.clone();
        macro_rules! take {
            ($($name:literal => $field:ident),*) => {$(
                if left > 0 && reader.skips($name) {
                    self.take($field, reader)?;
                    left -= 1;
                }
            )*};
        }
        take! {
            b"\xa4type" => TYPE,
            b"\xacblock_hashes" => HASHES,
            b"\xb1parent_block_hash" => PARENT,
            b"\xa9token_ids" => TOKENS,
            b"\xaablock_size" => BLOCK_SIZE,
            b"\xa7lora_id" => LORA_ID,
            b"\xa6medium" => MEDIUM,
            b"\xa9lora_name" => LORA_NAME,
            b"\xaaextra_keys" => EXTRA_KEYS,
            b"\xa9group_idx" => GROUP,
            b"\xb2kv_cache_spec_kind" => KIND,
            b"\xbckv_cache_spec_sliding_window" => WINDOW
        }
        *given = reader.clone();
        Ok(left)
    }

    /// Read the value of a field.
    #[inline(always)]
    fn take(&mut self, field: usize, reader: &mut Reader<'a>) -> Result<(), Malformed> {
        match field {
            TOKENS => reader.lend(|reader| self.take_tokens(reader))?,
            HASHES => reader.lend(|reader| self.take_hashes(reader))?,
            EXTRA_KEYS => reader.lend(|reader| self.take_extra_keys(reader))?,
            _ => self.raw[field] = Some(reader.raw_within(VALUE_DEPTH)?),
        }
        Ok(())
    }

    fn take_tokens(&mut self, reader: &mut Reader<'a>) -> Result<(), Malformed> {
        let tokens = reader.u32s();
        if tokens.is_err() {
            reader.raw_within(VALUE_DEPTH)?;
        }
        self.tokens = Some(tokens);
        Ok(())
    }

    fn take_extra_keys(&mut self, reader: &mut Reader<'a>) -> Result<(), Malformed> {
        self.nils = reader.nils();
        self.raw[EXTRA_KEYS] = if self.nils.is_some() { None } else { Some(reader.raw_within(VALUE_DEPTH)?) };
        Ok(())
    }

    fn take_hashes(&mut self, reader: &mut Reader<'a>) -> Result<(), Malformed> {
        self.hashes = reader.u64s().map(|hashes| hashes.map(EngineHash::Unsigned).collect());
        self.raw[HASHES] = if self.hashes.is_some() { None } else { Some(reader.raw_within(VALUE_DEPTH)?) };
        Ok(())
    }
}

type Read<T> = Result<T, SkipReason>;

/// Decode the event at which the reader stands into the list; it stands behind it then, whatever is wrong with the event.
///
/// # Errors
/// [`Malformed`] where its structure is not sound: then no event of the batch counts.
pub(super) fn decode<'a>(reader: &mut Reader<'a>, events: &mut Vec<Event<'a>>) -> Result<(), Malformed> {
    let mut fields = Fields::default();
    let tag = match reader.peek() {
        Some(0x90..=0x9f | 0xdc | 0xdd) => fields.take_array(reader)?,
        Some(0x80..=0x8f | 0xde | 0xdf) => fields.take_map(reader)?,
        _ => reader.raw_within(MAX_DEPTH - 1).map(|_| Err(SkipReason::NotAnEvent))?,
    };
    events.push(build(tag, &mut fields));
    Ok(())
}

fn wrong_type(_: Malformed) -> SkipReason {
    SkipReason::WrongType
}

/// Blocks may have left by an event of this kind; "" is a kind that could not be read.
fn may_remove(tag: &str) -> bool {
    let folded = tag.to_ascii_lowercase();
    tag.is_empty() || ["remove", "clear", "evict"].iter().any(|word| folded.contains(word))
}

fn tag_of(raw: Raw<'_>) -> Read<&str> {
    text(raw).map_err(|_| SkipReason::NoTag)
}

fn build<'a>(tag: Read<&str>, fields: &mut Fields<'a>) -> Event<'a> {
    let event = match tag {
        Ok("BlockStored") => stored(fields).map(Event::Stored),
        Ok("BlockRemoved") => removed(fields).map(Event::Removed),
        Ok("AllBlocksCleared") => Ok(Event::Cleared),
        Ok(_) => Err(SkipReason::UnknownTag),
        Err(reason) => Err(reason),
    };
    event.unwrap_or_else(|reason| Event::Skipped { reason, may_remove: may_remove(tag.unwrap_or_default()) })
}

/// The order of the checks decides which reason an event with several faults gives.
fn stored<'a>(fields: &mut Fields<'a>) -> Read<Stored<'a>> {
    let hashes = fields.hashes.take().map_or_else(|| read_hashes(&fields.raw), Ok)?;
    let (tokens, nils, fields) = (fields.tokens.take(), fields.nils, &fields.raw);
    let parent = match fields[PARENT] {
        None | Some(Raw([0xc0])) => None,
        Some(raw) => match raw.u64() {
            Some(hash) => Some(EngineHash::Unsigned(hash)),
            None => Some(hash(raw.reader().any().map_err(wrong_type)?)?),
        },
    };
    let lora_name = optional_text(fields, LORA_NAME)?;
    let lora_id = optional_int(fields, LORA_ID)?;
    let block_size = optional_int(fields, BLOCK_SIZE)?.unwrap_or(0);
    let block_size = u32::try_from(block_size).ok().filter(|size| *size < 1 << 31).ok_or(SkipReason::BadBlockSize)?;
    let tokens = tokens.transpose().map_err(|_| SkipReason::BadToken)?.flatten().unwrap_or_default();
    let tier = Tier::of_medium(optional_text(fields, MEDIUM)?);
    let extra_keys = match nils {
        Some(blocks) if blocks as usize == hashes.len() => Some(Vec::new()),
        Some(_) => return Err(SkipReason::WrongType),
        None => extra_keys(fields[EXTRA_KEYS], hashes.len(), lora_name, parent.is_none())?,
    };
    let group = group(fields)?.unwrap_or(0);
    let kind = optional_text(fields, KIND)?.map(Kind::of_spec);
    let window = optional_int(fields, WINDOW)?;
    optional_text(fields, SESSION)?;
    let adapter = Adapter::new(lora_name.map(Cow::Borrowed), lora_id.unwrap_or(-1));
    let run = Run { hashes, parent, tokens, block_size, adapter, extra_keys };
    Ok(Stored { run, tier, group, kind, window })
}

fn removed<'a>(fields: &mut Fields<'a>) -> Read<Removed<'a>> {
    let hashes = fields.hashes.take().map_or_else(|| read_hashes(&fields.raw), Ok)?;
    let fields = &fields.raw;
    let remaining = match fields[REMAINING] {
        Some(raw) => raw.reader().u32s().map_err(wrong_type)?,
        None => None,
    };
    if remaining.as_ref().is_some_and(|counts| counts.len() != hashes.len()) {
        return Err(SkipReason::WrongType);
    }
    let tier = Tier::of_medium(optional_text(fields, MEDIUM)?);
    Ok(Removed { hashes, tier, group: group(fields)?, remaining })
}

/// A string. Those that nearly all events have are compared: checking that they are UTF-8 takes longer.
#[inline]
fn text(raw: Raw<'_>) -> Result<&str, Malformed> {
    match raw.0 {
        b"\xabBlockStored" => Ok("BlockStored"),
        b"\xacBlockRemoved" => Ok("BlockRemoved"),
        b"\xa3GPU" => Ok("GPU"),
        b"\xaefull_attention" => Ok("full_attention"),
        _ => raw.reader().text(),
    }
}

fn optional_text<'a>(fields: &Raws<'a>, field: usize) -> Read<Option<&'a str>> {
    match fields[field] {
        None | Some(Raw([0xc0])) => Ok(None),
        Some(raw) => text(raw).map(Some).map_err(wrong_type),
    }
}

fn optional_int(fields: &Raws<'_>, field: usize) -> Read<Option<i64>> {
    match fields[field] {
        None | Some(Raw([0xc0])) => Ok(None),
        Some(Raw([small @ ..=0x7f])) => Ok(Some(i64::from(*small))),
        Some(raw) => match raw.reader().head() {
            Ok(Head::Int(value)) => Ok(Some(value)),
            _ => Err(SkipReason::WrongType),
        },
    }
}

fn group(fields: &Raws<'_>) -> Read<Option<i64>> {
    let group = optional_int(fields, GROUP)?;
    if group.is_some_and(|group| !(0..MAX_GROUPS).contains(&group)) { Err(SkipReason::BadGroup) } else { Ok(group) }
}

/// Hashes of any kind.
fn read_hashes<'a>(fields: &Raws<'a>) -> Read<Vec<EngineHash<'a>>> {
    let raw = fields[HASHES].ok_or(SkipReason::MissingField)?;
    let mut reader = raw.reader();
    let length = reader.array().map_err(wrong_type)?;
    let mut hashes = Vec::with_capacity((length as usize).min(raw.0.len()));
    // one that can't be read at all outweighs one that is no hash, wherever it stands
    let mut bad = None;
    for _ in 0..length {
        match hash(reader.any().map_err(wrong_type)?) {
            Ok(hash) => hashes.push(hash),
            Err(reason) => bad = Some(reason),
        }
    }
    bad.map_or(Ok(hashes), Err)
}

fn hash(value: Any<'_>) -> Read<EngineHash<'_>> {
    match value {
        Any::Int(value) => Ok(u64::try_from(value).map_or(EngineHash::Negative(value), EngineHash::Unsigned)),
        Any::Large(value) => Ok(EngineHash::Unsigned(value)),
        Any::Bytes(bytes) if (1..=EngineHash::MAX_BYTES).contains(&bytes.len()) => Ok(EngineHash::Bytes(bytes.into())),
        Any::Text(text) if (1..=EngineHash::MAX_TEXT).contains(&text.len()) => Ok(EngineHash::Text(text.into())),
        _ => Err(SkipReason::BadHash),
    }
}

fn extra_keys<'a>(
    raw: Option<Raw<'a>>,
    blocks: usize,
    lora_name: Option<&str>,
    at_root: bool,
) -> Read<Option<Vec<Vec<ExtraKey<'a>>>>> {
    let Some(raw) = raw.filter(|raw| !raw.is_nil()) else {
        return Ok(None);
    };
    let mut reader = raw.reader();
    let length = reader.array().map_err(wrong_type)?;
    if length as usize != blocks {
        return Err(SkipReason::WrongType);
    }
    let mut per_block = Vec::with_capacity(blocks);
    for at in 0..blocks {
        let keys = reader.raw().map_err(wrong_type)?;
        per_block.push(if keys.is_nil() { Vec::new() } else { typed(keys, lora_name, at_root && at == 0)? });
    }
    Ok(Some(per_block))
}

/// Give the untagged extra keys of one block their kinds (vLLM sends adapter, images, salt, embeds, in that order).
///
/// The adapter's name is the first string that equals `lora_name`; it is left out, since the adapter is part of the
/// context. Another string is the salt in a prompt's first block, and an image's identifier in later ones (0.17, 0.18).
fn typed<'a>(keys: Raw<'a>, lora_name: Option<&str>, first_block: bool) -> Read<Vec<ExtraKey<'a>>> {
    let mut reader = keys.reader();
    let length = reader.array().map_err(wrong_type)?;
    let mut typed = Vec::new();
    let mut adapter = lora_name;
    for _ in 0..length {
        let raw = reader.raw().map_err(wrong_type)?;
        match raw.reader().any().map_err(wrong_type)? {
            Any::Text(text) if Some(text) == adapter => adapter = None,
            Any::Text(text) if first_block => typed.push(ExtraKey::Salt(text.into())),
            Any::Text(text) => typed.push(ExtraKey::Image(text.into(), None)),
            Any::Bytes(digest) => typed.push(ExtraKey::Embeds(digest.into())),
            Any::Array(2) => typed.push(pair(raw)?),
            _ => typed.push(ExtraKey::Opaque(raw.0.into())),
        }
    }
    Ok(typed)
}

/// (identifier, offset) is an image from 0.19 on.
fn pair(raw: Raw<'_>) -> Read<ExtraKey<'_>> {
    let mut reader = raw.reader();
    reader.head().map_err(wrong_type)?;
    let (identifier, offset) = (reader.any().map_err(wrong_type)?, reader.any().map_err(wrong_type)?);
    Ok(match (identifier, offset) {
        (Any::Text(identifier), Any::Int(offset)) => ExtraKey::Image(identifier.into(), Some(offset.into())),
        (Any::Text(identifier), Any::Large(offset)) => ExtraKey::Image(identifier.into(), Some(offset.into())),
        _ => ExtraKey::Opaque(raw.0.into()),
    })
}
