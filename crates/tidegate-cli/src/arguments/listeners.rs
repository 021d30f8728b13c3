//! The options of the listeners: of each in [`LISTENERS`], one for its address and one for the file with its secret.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches, value_parser};
use tidegate_server::{LISTENERS, ListenerKind, Role};

use super::{SECRETS, listener_address};

/// What the arguments say about a listener.
#[derive(Debug)]
pub(crate) struct ListenerChoice {
    pub(crate) kind: &'static ListenerKind,
    /// The option that sets the address, without dashes.
    pub(crate) option: &'static str,
    /// `HOST:PORT` or `off`; `None` if the option was not given.
    pub(crate) address: Option<String>,
    /// The address if neither the option nor the configuration sets one.
    pub(crate) default_address: &'static str,
    /// The file with the secret that clients must send.
    pub(crate) secret_file: Option<PathBuf>,
}

/// The options of all listeners of role [`Operator`](Role::Operator), or of all others.
#[derive(Debug)]
pub(crate) struct ListenerOptions<const IS_OPERATOR: bool>(pub(crate) Vec<ListenerChoice>);

impl<const IS_OPERATOR: bool> ListenerOptions<IS_OPERATOR> {
    fn kinds() -> impl DoubleEndedIterator<Item = &'static ListenerKind> {
        LISTENERS.iter().copied().filter(|kind| (kind.role == Role::Operator) == IS_OPERATOR)
    }
}

impl<const IS_OPERATOR: bool> Args for ListenerOptions<IS_OPERATOR> {
    fn augment_args(command: Command) -> Command {
        command.args(Self::kinds().map(address_option)).args(Self::kinds().rev().filter_map(secret_option))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const IS_OPERATOR: bool> FromArgMatches for ListenerOptions<IS_OPERATOR> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let choices = Self::kinds().map(|kind| {
            let is_given = matches.value_source(kind.name) == Some(ValueSource::CommandLine);
            let secret_file = kind.secret.and_then(|secret| matches.get_one::<PathBuf>(secret.option));
            ListenerChoice {
                kind,
                option: kind.name,
                address: matches.get_one(kind.name).filter(|_| is_given).cloned(),
                default_address: kind.default_address,
                secret_file: secret_file.cloned(),
            }
        });
        Ok(ListenerOptions(choices.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Returns the option for the address of a listener.
fn address_option(kind: &'static ListenerKind) -> Arg {
    let option = Arg::new(kind.name).long(kind.name).help_heading(super::LISTENERS).value_name("ADDRESS");
    let option = option.value_parser(listener_address);
    let (help, default) = (format!("Address of {}; `off` disables it", kind.help), kind.default_address);
    match (kind.address_setting, kind.role) {
        (Some(setting), _) => {
            option.help(format!("{help} [default: {} in the configuration file, else {default}]", setting.help))
        }
        // The default is not a value of the option: if it is in use, the listener is off.
        (None, Role::Operator) => option.help(format!("{help} [default: {default}]")),
        (None, Role::Service) => option.help(help).default_value(default),
    }
}

/// Returns the option for the file with the secret of a listener, or `None` if it has no secret.
fn secret_option(kind: &'static ListenerKind) -> Option<Arg> {
    let secret = kind.secret?;
    let otherwise = match kind.role {
        Role::Service => "none",
        Role::Operator => "a token is generated and printed",
    };
    let help = format!(
        "File with the {} that {} [default: ${}, else {otherwise}]",
        secret.form.as_str(),
        secret.help,
        secret.variable
    );
    let option = Arg::new(secret.option).long(secret.option).help_heading(SECRETS).value_name("FILE");
    Some(option.value_parser(value_parser!(PathBuf)).help(help))
}

/// Returns the help text of `--insecure`, which names the listeners that it allows without a secret.
pub(super) fn insecure_help() -> String {
    let listeners = ListenerOptions::<false>::kinds().filter_map(|kind| {
        let secret = kind.secret?.form.as_str();
        Some(format!("{} without a {secret}", kind.name.to_uppercase()))
    });
    let listeners: Vec<String> = listeners.collect();
    format!("Allow {} on addresses that other machines can reach", listeners.join(" and "))
}
