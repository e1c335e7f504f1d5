// Package tables knows how the outbox's tables and indexes are called, and how
// a name is written in SQL. The migrator creates them and the dialects use
// them, so that it is said in one place.
package tables

import (
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxName is the longest name in bytes that PostgreSQL keeps whole
// (NAMEDATALEN - 1). SQLite has no bound; the same one is used.
const MaxName = 63

// Name is a message table.
type Name struct {
	Schema string // empty: found through the search_path; always on SQLite
	Table  string
}

// Validate says what is wrong with the name, or nil. Any characters will do but
// control characters.
func (n Name) Validate() error {
	if n.Table == "" {
		return errors.New("table name is empty")
	}
	if err := validate("table", n.Table); err != nil {
		return err
	}
	return validate("schema", n.Schema)
}

func validate(what, s string) error {
	switch {
	case len(s) > MaxName:
		return fmt.Errorf("%s name %q has %d bytes; the database would cut it to %d", what, s, len(s), MaxName)
	case !utf8.ValidString(s):
		return fmt.Errorf("%s name %q is not valid UTF-8", what, s)
	case strings.ContainsFunc(s, unicode.IsControl):
		return fmt.Errorf("%s name %q has control characters", what, s)
	}
	return nil
}

// Messages is the message table, qualified and quoted.
func (n Name) Messages() string { return n.qualify(n.Table) }

// Meta is the table beside it that records what is known of the table and of
// each outbox, qualified and quoted.
func (n Name) Meta() string { return n.qualify(n.MetaName()) }

// MetaName is the unqualified, unquoted name of the meta table.
func (n Name) MetaName() string { return n.Derived("_meta") }

// Derived is the unquoted name of something that belongs to the table, such as
// an index: the table's name with a suffix, shortened and made unique again by
// a hash where it would be too long.
func (n Name) Derived(suffix string) string {
	if len(n.Table)+len(suffix) <= MaxName {
		return n.Table + suffix
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(n.Table))
	cut := MaxName - len(suffix) - 9
	for !utf8.RuneStart(n.Table[cut]) {
		cut--
	}
	return fmt.Sprintf("%s_%08x%s", n.Table[:cut], h.Sum32(), suffix)
}

// IndexName is the unquoted name of an index of the table. It ends in _idx,
// because indexes share a namespace with tables: an application whose outbox is
// "orders" may well have a table "orders_dead".
func (n Name) IndexName(suffix string) string { return n.Derived(suffix + "_idx") }

// Index is the same, quoted for CREATE INDEX (which takes no schema).
func (n Name) Index(suffix string) string { return Quote(n.IndexName(suffix)) }

func (n Name) qualify(name string) string {
	if n.Schema == "" {
		return Quote(name)
	}
	return Quote(n.Schema) + "." + Quote(name)
}

// Quote writes an identifier, in the form that PostgreSQL and SQLite share.
func Quote(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

// Literal writes a string constant, in the form that PostgreSQL (with
// standard_conforming_strings, its default) and SQLite share.
func Literal(s string) string { return `'` + strings.ReplaceAll(s, `'`, `''`) + `'` }
