//! The command line: which command, and for `serve` and `check` the flags made from the list of keys.

use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Args as _, Command, FromArgMatches as _, value_parser};

use crate::config::{KEYS, Kind, Sources};
use crate::{demo, explain, lab, load};

/// What was asked for.
pub enum Ask {
    /// Run a replica.
    Serve(Sources),
    /// Read a configuration and say what is wrong with it.
    Check {
        /// Where it comes from.
        sources: Sources,
        /// Print the reference instead.
        reference: bool,
    },
    /// Run a simulated engine.
    Engine(Box<engine::Options>),
    /// Run a whole cluster on this machine.
    Demo(demo::Options),
    /// Send load.
    Load(Box<load::Options>),
    /// Play a workload in virtual time.
    Lab(Box<lab::Options>),
    /// Show a decision.
    Explain(explain::Options),
}

/// Flags that may be wrong at once; past this many the first ones are enough.
const UNKNOWN_FLAGS_MAX: usize = 32;

/// The arguments of a derived command bring their type's documentation as its description, so each command's own
/// comes after them.
fn command() -> Command {
    Command::new("grapevine")
        .about(
            "A cluster of routers for LLM inference: prefix- and load-aware, active-active, no extra service",
        )
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            demo::Options::augment_args(Command::new("demo"))
                .about("Runs three replicas over four simulated engines, with load, on this machine"),
        )
        .subcommand(with_keys(Command::new("serve").about("Runs one replica")))
        .subcommand(with_keys(
            Command::new("check").about("Reads a configuration and names every fault in it").arg(
                Arg::new("reference")
                    .long("reference")
                    .action(ArgAction::SetTrue)
                    .help("print the configuration reference (Markdown)"),
            ),
        ))
        .subcommand(
            engine::Options::augment_args(Command::new("engine"))
                .about("Runs a simulated engine (a vLLM look-alike)"),
        )
        .subcommand(
            load::Options::augment_args(Command::new("load"))
                .about("Sends generated chats or a trace to an OpenAI endpoint and measures"),
        )
        .subcommand(lab::Options::augment_args(Command::new("lab")).about(
            "Plays a trace or generated chats through simulated replicas and engines, in virtual time",
        ))
        .subcommand(
            explain::Options::augment_args(Command::new("explain"))
                .about("Shows what a replica would decide for a body, without sending it"),
        )
}

fn with_keys(command: Command) -> Command {
    let config = Arg::new("config")
        .long("config")
        .value_parser(value_parser!(PathBuf))
        .help("TOML file with any of these keys");
    KEYS.iter().fold(command.arg(config), |command, key| {
        let default =
            if key.default.is_empty() { String::new() } else { format!(" [default: {}]", key.default) };
        let arg = Arg::new(key.name)
            .long(key.flag())
            .value_name(key.name.to_ascii_uppercase())
            .action(if key.many { ArgAction::Append } else { ArgAction::Set })
            .help(format!("{}{default}", key.help));
        command.arg(if key.kind == Kind::Switch {
            arg.num_args(0..=1).default_missing_value("true").require_equals(true)
        } else {
            arg
        })
    })
}

/// Reads the arguments (the program's name first).
///
/// # Errors
/// With clap's own message for `--help`, `--version` and anything that is not about a key; its `exit` does
/// the right thing (status 2 for faults).
pub fn parse(arguments: Vec<String>) -> Result<Ask, clap::Error> {
    let (matches, unknown) = matches_and_unknown_flags(arguments)?;
    match matches.subcommand() {
        Some(("serve", given)) => Ok(Ask::Serve(sources(given, unknown))),
        Some(("check", given)) => {
            Ok(Ask::Check { sources: sources(given, unknown), reference: given.get_flag("reference") })
        }
        Some(("engine", given)) => Ok(Ask::Engine(Box::new(engine::Options::from_arg_matches(given)?))),
        Some(("demo", given)) => Ok(Ask::Demo(demo::Options::from_arg_matches(given)?)),
        Some(("load", given)) => Ok(Ask::Load(Box::new(load::Options::from_arg_matches(given)?))),
        Some(("lab", given)) => Ok(Ask::Lab(Box::new(lab::Options::from_arg_matches(given)?))),
        Some(("explain", given)) => Ok(Ask::Explain(explain::Options::from_arg_matches(given)?)),
        _ => Err(command().error(ErrorKind::MissingSubcommand, "a command is needed; see --help")),
    }
}

/// For the commands with keys an unknown flag is one fault among others, so that all can be told at once.
fn matches_and_unknown_flags(mut arguments: Vec<String>) -> Result<(ArgMatches, Vec<String>), clap::Error> {
    let keyed = matches!(arguments.get(1).map(String::as_str), Some("serve" | "check"));
    let mut unknown = Vec::new();
    loop {
        let error = match command().try_get_matches_from(&arguments) {
            Ok(matches) => return Ok((matches, unknown)),
            Err(error) => error,
        };
        let culprit = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(flag)) if error.kind() == ErrorKind::UnknownArgument => flag.clone(),
            _ => return Err(error),
        };
        let name = culprit.split('=').next().unwrap_or(&culprit).to_owned();
        let place = arguments.iter().position(|given| given.split('=').next() == Some(name.as_str()));
        match place {
            Some(place) if keyed && unknown.len() < UNKNOWN_FLAGS_MAX => {
                let bare = !arguments[place].contains('=');
                arguments.remove(place);
                if bare && arguments.get(place).is_some_and(|next| !next.starts_with('-')) {
                    arguments.remove(place);
                }
                unknown.push(name);
            }
            _ => return Err(error),
        }
    }
}

fn sources(given: &ArgMatches, unknown_flags: Vec<String>) -> Sources {
    let flags = KEYS
        .iter()
        .filter_map(|key| Some((key.name, given.get_many::<String>(key.name)?.cloned().collect())))
        .collect();
    Sources { unknown_flags, ..Sources::of_process(given.get_one::<PathBuf>("config").cloned(), flags) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown(line: &str) -> Vec<String> {
        match parse(line.split(' ').map(str::to_owned).collect()) {
            Ok(Ask::Serve(sources) | Ask::Check { sources, .. }) => sources.unknown_flags,
            _ => panic!("{line}: not taken"),
        }
    }

    #[test]
    fn every_key_is_a_flag() {
        for key in KEYS {
            let line = vec!["grapevine".to_owned(), "serve".to_owned(), format!("--{}=true", key.flag())];
            let Ok(Ask::Serve(sources)) = parse(line) else { panic!("--{} is not taken", key.flag()) };
            assert_eq!(sources.flags, [(key.name, vec!["true".to_owned()])]);
        }
    }

    #[test]
    fn unknown_flags_are_gathered_with_or_without_a_value() {
        assert_eq!(
            unknown("grapevine serve --lisen 1 --colour=red --policy cost --odd"),
            ["--lisen", "--colour", "--odd"]
        );
        assert!(unknown("grapevine serve --explain-headers --policy cost").is_empty());
    }

    #[test]
    fn other_commands_refuse_unknown_flags_by_themselves() {
        let line = "grapevine demo --colour red".split(' ').map(str::to_owned).collect();
        assert!(matches!(parse(line), Err(error) if error.exit_code() == 2));
    }
}
