//! The bytes are written by hand here; that every verdict equals the reference's is the contract suite's business.

use proptest::prelude::*;

use super::*;
use crate::event::{EngineHash, ExtraKey, SkipReason, Tier};
use crate::hits::Kind;

/// Just enough msgpack to write what engines send.
#[derive(Debug, Clone)]
enum Value {
    Nil,
    Int(i64),
    Text(&'static str),
    Bytes(&'static [u8]),
    List(Vec<Value>),
    Map(Vec<(&'static str, Value)>),
}

impl Value {
    fn write(&self, to: &mut Vec<u8>) {
        match self {
            Self::Nil => to.push(0xc0),
            Self::Int(value @ 0..=127) => to.push(*value as u8),
            Self::Int(value) => {
                to.push(0xd3);
                to.extend(value.to_be_bytes());
            }
            Self::Text(text) => {
                to.extend([0xd9, text.len() as u8]);
                to.extend(text.as_bytes());
            }
            Self::Bytes(bytes) => {
                to.extend([0xc4, bytes.len() as u8]);
                to.extend(*bytes);
            }
            Self::List(items) => {
                to.push(0xdc);
                to.extend((items.len() as u16).to_be_bytes());
                items.iter().for_each(|item| item.write(to));
            }
            Self::Map(items) => {
                to.push(0xde);
                to.extend((items.len() as u16).to_be_bytes());
                for (name, item) in items {
                    Self::Text(name).write(to);
                    item.write(to);
                }
            }
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes);
        bytes
    }

    /// As short as can be, which is what engines send.
    fn write_short(&self, to: &mut Vec<u8>) {
        match self {
            Self::Int(value @ 0x80..=0xff) => to.extend([0xcc, *value as u8]),
            Self::Int(value @ 0x100..=0xffff) => to.extend([&[0xcd], &value.to_be_bytes()[6..]].concat()),
            Self::Int(value @ 0x1_0000..=0xffff_ffff) => to.extend([&[0xce], &value.to_be_bytes()[4..]].concat()),
            Self::Int(value @ 0x1_0000_0000..) => to.extend([&[0xcf], &value.to_be_bytes()[..]].concat()),
            Self::Int(value @ -32..0) => to.push(*value as u8),
            Self::Text(text) if text.len() < 32 => {
                to.push(0xa0 | text.len() as u8);
                to.extend(text.as_bytes());
            }
            Self::List(items) if items.len() < 16 => {
                to.push(0x90 | items.len() as u8);
                items.iter().for_each(|item| item.write_short(to));
            }
            Self::List(items) => {
                to.push(0xdc);
                to.extend((items.len() as u16).to_be_bytes());
                items.iter().for_each(|item| item.write_short(to));
            }
            Self::Map(items) => {
                assert!(items.len() < 16);
                to.push(0x80 | items.len() as u8);
                for (name, item) in items {
                    Self::Text(name).write_short(to);
                    item.write_short(to);
                }
            }
            Self::Nil | Self::Int(_) | Self::Text(_) | Self::Bytes(_) => self.write(to),
        }
    }

    fn short(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write_short(&mut bytes);
        bytes
    }
}

use Value::{Bytes, Int, List, Map, Nil, Text};

fn batch(events: Vec<Value>) -> Vec<u8> {
    List(vec![Int(1), List(events), Int(0)]).bytes()
}

fn ints(values: impl IntoIterator<Item = i64>) -> Value {
    List(values.into_iter().map(Int).collect())
}

fn only(payload: &[u8]) -> Event<'_> {
    let mut batch = Batch::decode(payload).expect("a batch");
    let event = batch.next().expect("an event");
    assert_eq!(batch.next(), None);
    event
}

fn skipped(event: Value) -> (SkipReason, bool) {
    match only(&batch(vec![event])) {
        Event::Skipped { reason, may_remove } => (reason, may_remove),
        event => panic!("not skipped: {event:?}"),
    }
}

#[test]
fn a_map_of_0_32() {
    let payload = batch(vec![Map(vec![
        ("type", Text("BlockStored")),
        ("block_hashes", List(vec![Int(-1), Bytes(b"12345678"), Text("p")])),
        ("parent_block_hash", Int(9)),
        ("token_ids", ints([1, 200, 70_000, 4, 5, 6])),
        ("block_size", Int(2)),
        ("lora_id", Int(1)),
        ("medium", Text("cPu")),
        ("lora_name", Text("a")),
        (
            "extra_keys",
            List(vec![List(vec![Text("a"), Text("a"), List(vec![Text("i"), Int(-3)])]), Nil, List(vec![Int(4)])]),
        ),
        ("group_idx", Int(2)),
        ("kv_cache_spec_kind", Text("sliding_window")),
        ("kv_cache_spec_sliding_window", Int(128)),
        ("new_field", Map(vec![("a", Nil)])),
    ])]);
    let Event::Stored(stored) = only(&payload) else { panic!("not a store") };
    let run = &stored.run;
    assert_eq!(
        run.hashes,
        [EngineHash::Negative(-1), EngineHash::Bytes(b"12345678"[..].into()), EngineHash::Text("p".into())]
    );
    assert_eq!((&run.parent, run.block_size), (&Some(EngineHash::Unsigned(9)), 2));
    assert_eq!(run.tokens, [1, 200, 70_000, 4, 5, 6]);
    assert!(run.is_dense());
    assert_eq!(
        run.extra_keys.as_deref(),
        Some(
            &[
                vec![ExtraKey::Image("a".into(), None), ExtraKey::Image("i".into(), Some(-3))],
                vec![],
                vec![ExtraKey::Opaque([4][..].into())]
            ][..]
        )
    );
    assert_eq!((stored.tier, stored.group), (Some(Tier::Cpu), 2));
    assert_eq!((stored.kind, stored.window), (Some(Kind::Window), Some(128)));
}

#[test]
fn arrays_of_any_length() {
    let full = [
        Text("BlockStored"),
        ints([1]),
        Nil,
        ints([7, 8]),
        Int(2),
        Nil,
        Text("GPU"),
        Nil,
        Nil,
        Int(3),
        Nil,
        Nil,
        Int(99),
    ];
    for length in 2..=full.len() {
        let payload = batch(vec![List(full[..length].to_vec())]);
        let Event::Stored(stored) = only(&payload) else { panic!("not a store: {length}") };
        assert_eq!(stored.run.hashes, [EngineHash::Unsigned(1)]);
        assert_eq!(stored.run.tokens.len(), if length > 3 { 2 } else { 0 });
        assert_eq!(stored.group, if length > 9 { 3 } else { 0 });
    }
    let payload = batch(vec![List(vec![Text("BlockRemoved"), ints([1]), Text("FS"), Int(4)])]);
    let Event::Removed(removed) = only(&payload) else { panic!("not a removal") };
    assert_eq!((removed.tier, removed.group, removed.remaining), (Some(Tier::Storage), Some(4), None));
}

#[test]
fn one_bad_event_costs_itself() {
    let payload = batch(vec![Nil, List(vec![Text("BlockRemoved")]), List(vec![Text("AllBlocksCleared"), Int(1)])]);
    let events: Vec<_> = Batch::decode(&payload).expect("a batch").collect();
    assert_eq!(events[0], Event::Skipped { reason: SkipReason::NotAnEvent, may_remove: true });
    assert_eq!(events[1], Event::Skipped { reason: SkipReason::MissingField, may_remove: true });
    assert_eq!(events[2], Event::Cleared);
}

#[test]
fn tokens_of_all_widths() {
    let tokens: Vec<i64> =
        (0..600).map(|at| [5, 127, 128, 255, 256, 65_535, 65_536, 151_999, 0xffff_ffff][at % 9]).collect();
    for length in [0, 1, 15, 16, 17, 31, 32, 100, 600] {
        let event = |tokens: &[i64]| {
            let tokens = ints(tokens.iter().copied());
            Map(vec![("type", Text("BlockStored")), ("block_hashes", ints([1])), ("token_ids", tokens)]).short()
        };
        let payload = [&[0x92, 0x01, 0x91][..], &event(&tokens[..length])].concat();
        let Event::Stored(stored) = only(&payload) else { panic!("not a store") };
        assert!(stored.run.tokens.iter().map(|token| i64::from(*token)).eq(tokens[..length].iter().copied()));
        for bad in 0..length {
            let mut tokens = tokens[..length].to_vec();
            tokens[bad] = 1 << 32;
            let payload = [&[0x92, 0x01, 0x91][..], &event(&tokens)].concat();
            assert_eq!(only(&payload), Event::Skipped { reason: SkipReason::BadToken, may_remove: false });
        }
    }
}

#[test]
fn blocks_that_show_no_extra_keys() {
    let keys = |keys: Vec<Value>| {
        let hashes = ints([1 << 40, 2 << 40]);
        Map(vec![
            ("type", Text("BlockStored")),
            ("block_hashes", hashes),
            ("token_ids", ints([1, 2])),
            ("block_size", Int(1)),
            ("extra_keys", List(keys)),
        ])
    };
    let payload = batch(vec![keys(vec![Nil, Nil])]);
    let Event::Stored(stored) = only(&payload) else { panic!("not a store") };
    assert_eq!(stored.run.extra_keys, Some(vec![]), "shown, and none");
    assert!(stored.run.blocks().eq([(&[1][..], &[][..]), (&[2], &[])]));
    assert_eq!(skipped(keys(vec![Nil])), (SkipReason::WrongType, false));
    assert_eq!(skipped(keys(vec![Nil, Nil, Nil])), (SkipReason::WrongType, false));
}

#[test]
fn events_behind_the_first_lot() {
    let count = AHEAD as i64 * 2 + 3;
    let removal = |hash| List(vec![Text("BlockRemoved"), ints([hash])]);
    let payload = batch((0..count).map(removal).collect());
    let batch = Batch::decode(&payload).expect("a batch");
    let names: Vec<_> = batch.clone().flat_map(|event| event.hashes().to_vec()).collect();
    assert!(names.into_iter().eq((0..count as u64).map(EngineHash::Unsigned)));
    assert_eq!(batch.count(), count as usize);
    // the first lot is sound, but not what comes behind it
    for cut in 1..payload.len() {
        assert_eq!(Batch::decode(&payload[..cut]).expect_err("cut short"), BatchError::NotMsgpack);
    }
}

#[test]
fn reasons_to_skip() {
    let stored = |field: &'static str, value: Value| {
        Map(vec![("block_hashes", ints([1])), (field, value), ("type", Text("BlockStored"))])
    };
    assert_eq!(skipped(List(vec![])), (SkipReason::NoTag, true));
    assert_eq!(skipped(Map(vec![("kind", Text("BlockStored"))])), (SkipReason::NoTag, true));
    assert_eq!(skipped(List(vec![Int(1)])), (SkipReason::NoTag, true));
    assert_eq!(skipped(List(vec![Text("BlockTouched")])), (SkipReason::UnknownTag, false));
    assert_eq!(skipped(List(vec![Text("TierCLEARED")])), (SkipReason::UnknownTag, true));
    assert_eq!(skipped(List(vec![Text("BlockStored")])), (SkipReason::MissingField, false));
    assert_eq!(skipped(stored("block_hashes", Nil)), (SkipReason::WrongType, false));
    assert_eq!(skipped(stored("block_hashes", List(vec![Bytes(b"")]))), (SkipReason::BadHash, false));
    assert_eq!(skipped(stored("parent_block_hash", Bytes(&[0; 65]))), (SkipReason::BadHash, false));
    assert_eq!(skipped(stored("token_ids", ints([-1]))), (SkipReason::BadToken, false));
    assert_eq!(skipped(stored("token_ids", ints([1 << 32]))), (SkipReason::BadToken, false));
    assert_eq!(skipped(stored("block_size", Int(-1))), (SkipReason::BadBlockSize, false));
    assert_eq!(skipped(stored("block_size", Int(1 << 31))), (SkipReason::BadBlockSize, false));
    assert_eq!(skipped(stored("group_idx", Int(-1))), (SkipReason::BadGroup, false));
    assert_eq!(skipped(stored("group_idx", Int(256))), (SkipReason::BadGroup, false));
    assert_eq!(skipped(stored("medium", Int(1))), (SkipReason::WrongType, false));
    assert_eq!(skipped(stored("extra_keys", List(vec![Nil, Nil]))), (SkipReason::WrongType, false));
    assert_eq!(
        skipped(Map(vec![
            ("type", Text("BlockRemoved")),
            ("block_hashes", ints([1, 2])),
            ("remaining_copy_counts", ints([1])),
        ])),
        (SkipReason::WrongType, true)
    );
}

#[test]
fn what_is_no_batch() {
    let error = |payload: &[u8]| Batch::decode(payload).expect_err("no batch");
    assert_eq!(error(b""), BatchError::NotMsgpack);
    assert_eq!(error(b"\xc1"), BatchError::NotABatch);
    assert_eq!(error(b"text"), BatchError::NotABatch);
    assert_eq!(error(b"\x92\x01"), BatchError::NotMsgpack);
    assert_eq!(error(b"\x92\x01\x90\x90"), BatchError::NotMsgpack);
    assert_eq!(error(b"\x91\x01"), BatchError::MissingField);
    assert_eq!(error(b"\x80"), BatchError::MissingField);
    assert_eq!(error(b"\x92\xc0\x90"), BatchError::WrongType);
    assert_eq!(error(b"\x92\x01\x80"), BatchError::WrongType);
    assert_eq!(error(b"\x93\x01\x90\xa0"), BatchError::WrongType);
    assert_eq!(error(&vec![0x90; MAX_PAYLOAD + 1]), BatchError::TooLarge);
}

#[test]
fn declared_lengths_are_never_trusted() {
    for start in [0xc6, 0xdb, 0xdd, 0xdf] {
        let payload = [0x92, 0x01, start, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(Batch::decode(&payload).expect_err("no batch"), BatchError::NotMsgpack);
    }
}

#[test]
fn nesting_is_bounded() {
    let nested = |levels: usize| [&[0x92, 0x01][..], &vec![0x91; levels], &[0xc0]].concat();
    assert!(Batch::decode(&nested(MAX_DEPTH as usize)).is_ok());
    assert_eq!(Batch::decode(&nested(MAX_DEPTH as usize + 1)).expect_err("too deep"), BatchError::NotMsgpack);
    assert_eq!(Batch::decode(&nested(10_000_000)).expect_err("too deep"), BatchError::NotMsgpack);
}

#[test]
fn many_tiny_events_cost_no_memory() {
    let mut payload = vec![0x92, 0x01, 0xdd];
    payload.extend(MAX_EVENTS.to_be_bytes());
    payload.extend(vec![0xc0; MAX_EVENTS as usize]);
    let batch = Batch::decode(&payload).expect("a batch");
    assert_eq!(batch.filter(|event| matches!(event, Event::Skipped { .. })).count(), MAX_EVENTS as usize);
    payload[3..7].copy_from_slice(&(MAX_EVENTS + 1).to_be_bytes());
    payload.push(0xc0);
    assert_eq!(Batch::decode(&payload).expect_err("too many"), BatchError::TooLarge);
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Nil),
        (-2i64..300).prop_map(Int),
        prop::sample::select(vec!["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "a", ""]).prop_map(Text),
        Just(Bytes(b"12345678")),
    ];
    leaf.prop_recursive(5, 60, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(List),
            prop::collection::vec(
                (prop::sample::select(vec!["type", "block_hashes", "token_ids", "extra_keys", "ts", "events"]), inner),
                0..8
            )
            .prop_map(Map),
        ]
    })
}

/// Reads all there is; returns how many events there were.
fn read(payload: &[u8]) -> usize {
    Batch::decode(payload).map_or(0, Iterator::count)
}

/// A store as engines send it, but for fields that are of another kind, that come twice, or come in another order.
fn store() -> impl Strategy<Value = Value> {
    let token = prop_oneof![60 => 0i64..152_000, 1 => prop::sample::select(vec![-1, 0xffff_ffff, 1 << 32, i64::MAX])];
    let hash = prop_oneof![30 => (1i64 << 32..).prop_map(Int), 1 => value()];
    let key = prop_oneof![20 => Just(Nil), 1 => Just(List(vec![Text("salt")])), 1 => Just(List(vec![]))];
    let strange = prop::collection::vec((0..13usize, value(), any::<bool>()), 0..2);
    let order = prop_oneof![3 => Just((0..12usize).collect::<Vec<_>>()), 1 => Just((0..12).collect()).prop_shuffle()];
    let (tokens, hashes, keys) =
        (prop::collection::vec(token, 0..70), prop::collection::vec(hash, 0..20), prop::collection::vec(key, 0..20));
    (tokens, hashes, keys, strange, order, 0..13usize).prop_map(|(tokens, hashes, mut keys, strange, order, left)| {
        if strange.is_empty() {
            keys.resize(hashes.len(), Nil);
        }
        let mut fields = vec![
            ("type", Text("BlockStored")),
            ("block_hashes", List(hashes)),
            ("parent_block_hash", Int(i64::MAX - 1)),
            ("token_ids", ints(tokens)),
            ("block_size", Int(16)),
            ("lora_id", Nil),
            ("medium", Text("GPU")),
            ("lora_name", Nil),
            ("extra_keys", List(keys)),
            ("group_idx", Int(1)),
            ("kv_cache_spec_kind", Text("full_attention")),
            ("kv_cache_spec_sliding_window", Nil),
        ];
        fields = order.into_iter().map(|at| fields[at].clone()).collect();
        for (at, other, instead) in strange {
            let name = fields[at % fields.len()].0;
            if instead {
                let at = at % fields.len();
                fields[at] = (name, other);
            } else {
                fields.insert(at.min(fields.len()), (name, other));
            }
        }
        if left < fields.len() && left % 3 == 0 {
            fields.remove(left);
        }
        Map(fields)
    })
}

/// What is left out of account: raw bytes, which tell how a key of an unknown kind was written.
fn events(payload: &[u8]) -> Vec<Event<'_>> {
    let mut events: Vec<_> = Batch::decode(payload).expect("a batch").collect();
    for event in &mut events {
        if let Event::Stored(stored) = event {
            let keys = stored.run.extra_keys.iter_mut().flatten().flatten();
            keys.filter(|key| matches!(key, ExtraKey::Opaque(_))).for_each(|key| *key = ExtraKey::Opaque(b"".into()));
        }
    }
    events
}

proptest! {
    /// Values of the usual form are read on a way of their own.
    #[test]
    fn long_and_short_forms_say_the_same(stores in prop::collection::vec(store(), 1..4)) {
        let short = List(vec![Int(1), List(stores.clone()), Int(0)]).short();
        let long = batch(stores);
        prop_assert_eq!(events(&long), events(&short));
    }

    #[test]
    fn any_bytes_are_safe(payload in prop::collection::vec(any::<u8>(), 0..200)) {
        read(&payload);
    }

    #[test]
    fn every_event_keeps_its_place(events in prop::collection::vec(value(), 0..6)) {
        prop_assert_eq!(read(&batch(events.clone())), events.len());
    }

    #[test]
    fn damage_is_safe(
        events in prop::collection::vec(value(), 1..4),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut payload = batch(events);
        for (at, byte) in damage {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        read(&payload);
        read(&payload[..cut.index(payload.len())]);
    }
}

#[test]
fn more_hashes_than_lookups_can_wait_for_are_refused() {
    // ints of one byte each, so that the payload is as short as it can be
    let removed = |hashes: usize| {
        let mut event = vec![0x92, 0xac];
        event.extend(b"BlockRemoved");
        event.push(0xdd);
        event.extend((hashes as u32).to_be_bytes());
        event.resize(event.len() + hashes, 1);
        event
    };
    let payload = |events: &[Vec<u8>]| [&[0x92, 0x01, 0xdc, 0, events.len() as u8][..], &events.concat()].concat();
    let half = removed(MAX_HASHES / 2);
    let most = payload(&[half.clone(), half.clone()]);
    let read: usize = Batch::decode(&most).expect("a batch").map(|event| event.hashes().len()).sum();
    assert_eq!(read, MAX_HASHES);
    let more = payload(&[half.clone(), half, removed(1)]);
    assert_eq!(Batch::decode(&more).expect_err("too many"), BatchError::TooLarge);
    // many of them, in several lots
    let mut events = vec![removed(MAX_HASHES / 128); 128];
    assert!(events.len() > AHEAD as usize && Batch::decode(&payload(&events)).is_ok());
    events.push(removed(1));
    assert_eq!(Batch::decode(&payload(&events)).expect_err("too many"), BatchError::TooLarge);
}
