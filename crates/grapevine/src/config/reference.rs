//! The configuration reference, written from the list of keys: `docs/config.md` is this text.

use std::fmt::Write as _;

use routing::settings::Settings;

use super::keys::KEYS;

/// The reference as Markdown.
pub fn reference() -> String {
    let mut text = String::from(
        "# Configuration reference\n\n\
         Written by `grapevine check --reference`; a test keeps it equal to the code.\n\n\
         Each key is a flag of `grapevine serve` (`--tries-max 2`), an environment variable (`GRAPEVINE_TRIES_MAX=2`)\n\
         and a key of the TOML file given with `--config` (`tries_max = 2`). A flag beats the environment, which beats\n\
         the file. A *list* may be given several times (a list in TOML, separated by blanks in the environment). What is\n\
         *live* is read again on SIGHUP, all or nothing; the rest needs a restart, and a SIGHUP that would change it\n\
         changes nothing and says so.\n\n\
         | key | default | allowed | | what it does |\n|---|---|---|---|---|\n",
    );
    for key in KEYS {
        let default = if key.default.is_empty() { "-".to_owned() } else { format!("`{}`", key.default) };
        let marks = [(key.many, "list"), (key.reload, "live")];
        let marks: Vec<_> = marks.iter().filter(|(on, _)| *on).map(|(_, mark)| *mark).collect();
        let _ = writeln!(
            text,
            "| `{}` | {default} | {} | {} | {} |",
            key.name,
            key.kind.allowed(),
            marks.join(", "),
            key.help
        );
    }
    text.push_str(
        "\n## Numbers of policies and filters\n\n\
         In TOML under `[policy.NAME]` and `[filter.NAME]`, where the policy itself is named by `[policy]` and\n\
         `name = \"NAME\"`; in a flag or variable behind the name: `--policy cost,tie_ms=3`. What each number means\n\
         stands with the policies in the README.\n\n\
         | table | key | default |\n|---|---|---|\n",
    );
    for (key, default) in numbers() {
        let (table, number) = key.rsplit_once('.').unwrap_or(("", &key));
        let default = default.map_or_else(|| "-".to_owned(), |default| format!("`{default}`"));
        let _ = writeln!(text, "| `[{table}]` | `{number}` | {default} |");
    }
    text
}

/// Every number of the policies and filters, `policy.NAME.KEY` or `filter.NAME.KEY`, with its default; `None`
/// for one that is unset.
pub fn numbers() -> Vec<(String, Option<String>)> {
    let settings = Settings::default();
    let mut all = Vec::new();
    list(&mut all, "policy", &settings.policy_tables);
    list(&mut all, "filter", &settings.filter_tables);
    all
}

fn list(all: &mut Vec<(String, Option<String>)>, kind: &str, tables: &impl serde::Serialize) {
    // Plain structs of numbers always serialise. To JSON, since TOML would leave out what is unset.
    let Ok(serde_json::Value::Object(tables)) = serde_json::to_value(tables) else { return };
    for (name, table) in &tables {
        for (key, default) in table.as_object().into_iter().flatten() {
            let default = (!default.is_null()).then(|| default.to_string());
            all.push((format!("{kind}.{name}.{key}"), default));
        }
    }
}
