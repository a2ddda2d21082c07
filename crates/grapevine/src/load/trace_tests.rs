use super::*;

const MOONCAKE: &str = include_str!("samples/mooncake_conversation.jsonl");
const AZURE: &str = include_str!("samples/azure_2023_conv.csv");

fn read(text: &str, reading: Reading) -> anyhow::Result<Trace> {
    Trace::read(text.as_bytes(), &reading)
}

#[test]
fn equal_hash_ids_give_equal_text_and_others_differ() {
    let trace = read(MOONCAKE, Reading::default()).unwrap();
    let block = |row: usize, block: usize| {
        let prompt = trace.rows[row].prompt_text(7, row as u64);
        prompt[block * 2048..(block + 1) * 2048].to_owned()
    };
    assert_eq!(block(0, 0), block(1, 0), "both begin with id 0");
    assert_ne!(block(0, 1), block(1, 1), "ids 1 and 14");
}

#[test]
fn prompts_have_four_bytes_a_token_the_last_block_in_part() {
    for (text, count) in [(MOONCAKE, 10), (AZURE, 8)] {
        let trace = read(text, Reading::default()).unwrap();
        assert_eq!(trace.rows.len(), count);
        for (index, row) in trace.rows.iter().enumerate() {
            assert_eq!(row.prompt_text(1, index as u64).len(), row.input_tokens as usize * 4);
        }
    }
    let trace = read(MOONCAKE, Reading::default()).unwrap();
    assert_eq!((trace.rows[0].input_tokens, trace.rows[0].output_tokens), (6758, 500));
}

#[test]
fn a_short_last_block_is_the_start_of_the_whole_one() {
    let lines = r#"{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[3,4]}
                   {"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[3,4]}"#;
    let trace = read(lines, Reading { arrivals: Some(Arrivals::Recorded), ..Reading::default() }).unwrap();
    assert!(trace.rows[1].prompt_text(1, 1).starts_with(&trace.rows[0].prompt_text(1, 0)));
}

#[test]
fn azure_times_count_from_the_first_row_and_prompts_are_unique() {
    let trace = read(AZURE, Reading::default()).unwrap();
    assert_eq!(trace.rows[0].at, Duration::ZERO);
    // 18:15:46.6805900 to 18:15:50.9951690
    assert_eq!(trace.rows[1].at, Duration::from_nanos(4_314_579_000));
    assert_ne!(trace.rows[0].prompt_text(1, 0)[..64], trace.rows[1].prompt_text(1, 1)[..64]);
}

#[test]
fn mooncake_arrivals_are_spread_unless_asked_as_recorded() {
    let recorded =
        read(MOONCAKE, Reading { arrivals: Some(Arrivals::Recorded), ..Reading::default() }).unwrap();
    let spread = read(MOONCAKE, Reading::default()).unwrap();
    assert!(recorded.rows.iter().all(|row| row.at.as_millis().is_multiple_of(3000)));
    let moved =
        recorded.rows.iter().zip(&spread.rows).filter(|(before, after)| before.at != after.at).count();
    assert_eq!(moved, 10);
}

#[test]
fn a_part_of_a_trace_is_its_beginning() {
    let whole = read(MOONCAKE, Reading::default()).unwrap();
    let part = read(MOONCAKE, Reading { until: Some(Duration::from_secs(3)), ..Reading::default() }).unwrap();
    assert!(!part.rows.is_empty() && part.rows.len() < whole.rows.len());
    assert_eq!(part.rows[..], whole.rows[..part.rows.len()]);
}

#[test]
fn a_bound_on_answers_holds_and_an_empty_answer_asks_for_one_token() {
    let trace = read(MOONCAKE, Reading { output_tokens_max: Some(100), ..Reading::default() }).unwrap();
    assert_eq!(trace.rows.iter().map(|row| row.output_tokens).max(), Some(100));
    let line = r#"{"timestamp":0,"input_length":0,"output_length":0,"hash_ids":[3]}"#;
    let row = &read(line, Reading::default()).unwrap().rows[0];
    assert_eq!((row.input_tokens, row.output_tokens), (1, 1));
}

#[test]
fn a_fault_names_its_line_and_what_is_wrong() {
    let azure = |row: &str| format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n");
    let check = |text: &str, wants: &[&str]| {
        let message = format!("{:#}", read(text, Reading::default()).unwrap_err());
        assert!(wants.iter().all(|want| message.contains(want)), "{message}");
    };
    check("", &["no request"]);
    check("a,b,c", &["line 1", "TIMESTAMP,ContextTokens,GeneratedTokens"]);
    check("{\"timestamp\":1}", &["line 1", "input_length"]);
    check(
        r#"{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}"#,
        &["1 hash_ids", "make 2"],
    );
    check(r#"{"timestamp":-5,"input_length":6,"output_length":1,"hash_ids":[1]}"#, &["timestamp"]);
    check(&azure("2023-11-16 18:17:03.97,1"), &["line 2", "three fields"]);
    check(&azure("yesterday,1,2"), &["line 2", "yesterday"]);
    check(&azure("2023-11-16 18:17:03.97,many,2"), &["line 2", "ContextTokens", "many"]);
    check(&azure("2023-11-16 18:17:03.97,4000000000,2"), &["line 2", "4000000000"]);
}

#[test]
fn spreading_an_azure_trace_is_refused() {
    let message =
        read(AZURE, Reading { arrivals: Some(Arrivals::Spread), ..Reading::default() }).unwrap_err();
    assert!(message.to_string().contains("recorded"));
}
