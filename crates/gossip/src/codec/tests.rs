//! Golden vectors: what replicas of this version say to each other, byte by byte.

use proptest::prelude::*;
use routing::endpoint::EndpointSpec;
use routing::facts::{
    AdminFact, AdminOperation, LedgerRecord, LoadRow, ObservedRow, QueueRow, SpeedRow, StagedPush, StagedRow,
};
use routing::{BlockHash, EndpointId, ReplicaId, SessionKey};

use super::*;
use crate::wire::{Head, Meta, Part, Presence, PullReply, PullRequest, Push, Run, Staged, Waiting, Wanted};

fn golden<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T, hex: &str) {
    let bytes = encode(value).expect("it is small");
    let actual: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(actual, hex, "the encoding of {value:?} changed: that needs a new VERSION");
    assert_eq!(decode::<T>(&bytes).as_ref(), Ok(value));
    assert_eq!(from_text::<T>(&to_text(value).expect("it is small")).as_ref(), Ok(value));
}

const ENDPOINT: EndpointId = EndpointId::from_raw(0x0102_0304_0506_0708);

fn load(running: u32) -> LoadRow {
    LoadRow { endpoint: ENDPOINT, running, prefill_tokens: 300, decode_tokens: 70_000, placed_tokens: 0 }
}

fn place(blocks: &[u64]) -> LedgerRecord {
    let blocks = blocks.iter().map(|&raw| BlockHash::from_raw(raw)).collect();
    LedgerRecord::Place { endpoint: ENDPOINT, blocks }
}

#[test]
fn values_on_the_boards() {
    let state = Presence { ready: true, draining: false, goodbye: true };
    golden(&Meta { version: 500, state }, "01fbf401010001");
    let queue = QueueRow {
        requests: [0, 300, 7],
        running: 12,
        held: vec![(65_535, 3), (7, 1)],
        ..QueueRow::default()
    };
    golden(&Waiting { version: 500, queue }, "01fbf40100fb2c01070c02fbffff0307010000");
    golden(&Head { sequence: 7, digest: u64::MAX }, "0107fdffffffffffffffff");
    let part = Part {
        version: 1,
        split: 2,
        load: vec![load(3)],
        observed: vec![ObservedRow {
            endpoint: ENDPOINT,
            age_ms: 40,
            running: 1,
            waiting: 2,
            kv_ratio: Some(0.5),
            engine_epoch: 9,
        }],
        speed: vec![SpeedRow {
            endpoint: ENDPOINT,
            prefill_us_per_token: 250.0,
            prefill_samples: 1_000,
            itl_us: 12_000.0,
            itl_samples: 1,
        }],
        ejected: vec![ENDPOINT],
    };
    golden(
        &part,
        "01010201fd080706050403020103fb2c01fc701101000001fd08070605040302012801020\
         10000003f0901fd080706050403020100007a43fbe80300803b460101fd0807060504030201",
    );
}

#[test]
fn ledger_records() {
    let run = |record| Run { first: 300, records: vec![record] };
    golden(&run(place(&[1, u64::MAX])), "01fb2c010100fd08070605040302010201fdffffffffffffffff");
    golden(
        &run(LedgerRecord::Withdraw { endpoint: ENDPOINT, blocks: vec![] }),
        "01fb2c010101fd080706050403020100",
    );
    golden(
        &run(LedgerRecord::Clear { endpoint: ENDPOINT, engine_epoch: 5 }),
        "01fb2c010102fd080706050403020105",
    );
    let pin = LedgerRecord::Pin { key: SessionKey::from_raw(4), endpoint: ENDPOINT };
    golden(&run(pin), "01fb2c01010304fd0807060504030201");
    let admin = |operation| {
        let replica = ReplicaId::new("a");
        run(LedgerRecord::Admin(AdminFact { endpoint: ENDPOINT, operation, counter: 2, replica }))
    };
    golden(&admin(AdminOperation::Remove), "01fb2c010104fd080706050403020101020161");
    golden(
        &admin(AdminOperation::Drain { deadline_ms: 60_000 }),
        "01fb2c010104fd080706050403020102fb60ea020161",
    );
    let spec = EndpointSpec::parse("http://e:80,role=prefill,model=m,dp=1").expect("it is well-formed");
    let spec = spec.into_iter().next().expect("there is one");
    golden(
        &admin(AdminOperation::Add(spec)),
        "01fb2c010104fd0807060504030201000b687474703a2f2f653a383001000001016d00000000020161",
    );
}

#[test]
fn pushes_and_pulls() {
    let push = Push {
        replica: ReplicaId::new("a"),
        generation: 1,
        version: 2,
        state: Presence { ready: true, ..Presence::default() },
        head: Head { sequence: 3, digest: 4 },
        run: Run { first: 3, records: vec![place(&[5])] },
        load: vec![load(0)],
    };
    golden(&push, "01016101020100000304030100fd0807060504030201010501fd080706050403020100fb2c01fc7011010000");
    let request =
        |wanted| PullRequest { replica: ReplicaId::new("a"), generation: 1, nonce: [9; 16], wanted };
    golden(&request(Wanted::Range { from: 6 }), "01016101090909090909090909090909090909090006");
    golden(&request(Wanted::Snapshot { cursor: Some(6) }), "0101610109090909090909090909090909090909010106");
    golden(&PullReply::Gone, "0101");
    golden(&PullReply::NotMe, "0103");
}

#[test]
fn what_is_staged() {
    let row = |number, token: Option<&[u8]>| StagedRow {
        number,
        prefill: ENDPOINT,
        token: token.map(<[u8]>::to_vec),
    };
    let rows = vec![row(300, Some(b"ab")), row(305, None)];
    let mut staged = Staged::new(ReplicaId::new("a"), 1, 2, &[300, 301, 305]);
    golden(&staged, "010161010201fb2c0102010400");
    staged.rows.clone_from(&rows);
    golden(&staged, "010161010201fb2c0102010402fb2c01fd080706050403020101026162fb3101fd080706050403020100");
    assert_eq!(staged.into_push(), StagedPush { epoch: 1, version: 2, held: vec![300, 301, 305], rows });
    let nothing = Staged::new(ReplicaId::new("a"), 1, 3, &[]);
    golden(&nothing, "0101610103000000");
    assert_eq!(nothing.into_push().held, []);
}

#[test]
fn what_is_not_a_value_is_told_apart() {
    assert_eq!(decode::<Head>(&[]), Err(DecodeError::Empty));
    assert_eq!(decode::<Head>(&[2, 0, 0]), Err(DecodeError::Version(2)));
    assert_eq!(decode::<Head>(&[1, 0]), Err(DecodeError::Malformed));
    assert_eq!(decode::<Head>(&[1, 0, 0, 0]), Err(DecodeError::Malformed));
    assert_eq!(from_text::<Head>("?"), Err(DecodeError::Text));
    // A list that claims to have 2^63 items.
    assert_eq!(decode::<Run>(&[1, 0, 253, 0, 0, 0, 0, 0, 0, 0, 128]), Err(DecodeError::Malformed));
}

fn records() -> impl Strategy<Value = LedgerRecord> {
    let id = any::<u64>().prop_map(EndpointId::from_raw);
    let blocks = proptest::collection::vec(any::<u64>().prop_map(BlockHash::from_raw), 0..20);
    prop_oneof![
        (id.clone(), blocks.clone()).prop_map(|(endpoint, blocks)| LedgerRecord::Place { endpoint, blocks }),
        (id.clone(), blocks).prop_map(|(endpoint, blocks)| LedgerRecord::Withdraw { endpoint, blocks }),
        (id.clone(), any::<u64>())
            .prop_map(|(endpoint, engine_epoch)| LedgerRecord::Clear { endpoint, engine_epoch }),
        (id, any::<u64>())
            .prop_map(|(endpoint, key)| LedgerRecord::Pin { key: SessionKey::from_raw(key), endpoint }),
    ]
}

proptest! {
    #[test]
    fn what_is_encoded_decodes(
        name in "[a-z0-9-]{1,20}",
        generation in any::<u64>(),
        version in any::<u64>(),
        first in any::<u64>(),
        records in proptest::collection::vec(records(), 0..10),
        load in proptest::collection::vec(any::<u32>().prop_map(load), 0..10),
    ) {
        let push = Push {
            replica: ReplicaId::new(&name),
            generation,
            version,
            state: Presence::default(),
            head: Head::default(),
            run: Run { first, records },
            load,
        };
        prop_assert_eq!(decode::<Push>(&encode(&push).expect("it is small")), Ok(push));
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), ours in any::<bool>()) {
        let mut bytes = bytes;
        if ours && !bytes.is_empty() {
            bytes[0] = VERSION;
        }
        let _ = decode::<Push>(&bytes);
        let _ = decode::<Staged>(&bytes).map(Staged::into_push);
        let _ = decode::<Part>(&bytes);
        let _ = decode::<Run>(&bytes);
        let _ = decode::<PullRequest>(&bytes);
        let _ = decode::<PullReply>(&bytes);
        let _ = from_text::<Meta>(&String::from_utf8_lossy(&bytes));
    }
}
