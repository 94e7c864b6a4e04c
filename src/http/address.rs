//! Which addresses may be dialled. Decided on the parsed address, never on a spelling, and by what is known to be
//! public rather than by what is known to be bad.
//!
//! Sources: the IANA IPv4 and IPv6 special-purpose address registries (RFC 6890), RFC 4291, RFC 6052 (NAT64),
//! RFC 8215 (local-use NAT64), RFC 3056 (6to4), RFC 4380 (Teredo), RFC 5214 (ISATAP).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Destination;

/// Whether an address may be dialled for `destination`; the word names the kind of address that is refused.
pub fn address_allowed(destination: Destination, ip: IpAddr) -> Result<(), &'static str> {
    match (destination, classify(ip)) {
        (Destination::Operator, _) | (_, Kind::Public) | (Destination::AgentLocal, Kind::Loopback) => Ok(()),
        (_, Kind::Loopback) => Err("address_loopback"),
        (_, Kind::Refused(word)) => Err(word),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Public,
    Loopback,
    Refused(&'static str),
}

fn classify(ip: IpAddr) -> Kind {
    match ip {
        IpAddr::V4(ip) => classify_v4(ip),
        IpAddr::V6(ip) => classify_v6(ip),
    }
}

fn classify_v4(ip: Ipv4Addr) -> Kind {
    match ip.octets() {
        [127, ..] => Kind::Loopback,
        [0, ..] => Kind::Refused("address_unspecified"),
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => Kind::Refused("address_private"),
        // Carrier-grade NAT; also where one cloud keeps its metadata service (100.100.100.200).
        [100, 64..=127, ..] => Kind::Refused("address_private"),
        [169, 254, ..] => Kind::Refused("address_link_local"),
        // A cloud's host agent, answering on a public-looking address inside each of its virtual machines.
        [168, 63, 129, 16] => Kind::Refused("address_metadata"),
        [192, 0, 0, _] => Kind::Refused("address_reserved"),
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => Kind::Refused("address_documentation"),
        // The former 6to4 relay anycast: an inner address could hide behind the relay.
        [192, 88, 99, _] => Kind::Refused("address_transition"),
        [198, 18..=19, ..] => Kind::Refused("address_benchmarking"),
        [224..=239, ..] => Kind::Refused("address_multicast"),
        [240..=255, ..] => Kind::Refused("address_reserved"),
        _ => Kind::Public,
    }
}

fn classify_v6(ip: Ipv6Addr) -> Kind {
    let s = ip.segments();
    let inner = Ipv4Addr::from((u32::from(s[6]) << 16) | u32::from(s[7]));
    match s {
        [0, 0, 0, 0, 0, 0, 0, 1] => Kind::Loopback,
        [0, 0, 0, 0, 0, 0, 0, 0] => Kind::Refused("address_unspecified"),
        // Mapped: the system dials the IPv4 address itself.
        [0, 0, 0, 0, 0, 0xffff, _, _] => classify_v4(inner),
        // NAT64: the translator dials the IPv4 address. Public ones must work on clusters that have IPv6 only; its
        // loopback would be the translator's, which nobody means.
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] => match classify_v4(inner) {
            Kind::Loopback => Kind::Refused("address_transition"),
            kind => kind,
        },
        [0xfe80..=0xfebf, ..] => Kind::Refused("address_link_local"),
        [0xfec0..=0xfeff, ..] | [0xfc00..=0xfdff, ..] => Kind::Refused("address_private"),
        [0xff00..=0xffff, ..] => Kind::Refused("address_multicast"),
        // Outside 2000::/3 nothing is globally routed: compatible and translated IPv4, local-use NAT64, discard, SRv6.
        [0x0000..=0x1fff, ..] | [0x4000..=0xffff, ..] => Kind::Refused("address_reserved"),
        // IETF protocol assignments: Teredo, benchmarking, ORCHID and others.
        [0x2001, 0x0000..=0x01ff, ..] => Kind::Refused("address_transition"),
        [0x2002, ..] => Kind::Refused("address_transition"),
        [0x2001, 0x0db8, ..] | [0x3fff, 0x0000..=0x0fff, ..] => Kind::Refused("address_documentation"),
        // ISATAP: the last four bytes are the IPv4 address that the packet is tunnelled to.
        [_, _, _, _, 0x0000 | 0x0200, 0x5efe, _, _] => Kind::Refused("address_transition"),
        _ => Kind::Public,
    }
}
