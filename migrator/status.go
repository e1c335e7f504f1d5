package migrator

import (
	"context"
	"fmt"
	"strings"

	"github.com/gormoutbox/outbox/internal/tables"
)

// Status is what is found of the tables.
type Status struct {
	// Version is what the tables have; 0: they are not there.
	Version int
	// Latest is the version of this library.
	Latest int
	// Installation is the random id that was drawn when the tables were
	// created, a part of every message's DedupID. Empty if Version is 0.
	Installation string
	// Drift says in sentences where tables of the latest version differ from
	// what was created: columns that are missing or altered, indexes that are
	// missing, altered or invalid. Columns and indexes that were added are no
	// drift. Nil if Version is not Latest.
	Drift []string
}

// Status looks at the tables and at the database's catalog. Tables that are
// missing, older or newer are no error.
func (m *Migrator) Status(ctx context.Context) (Status, error) {
	s, err := m.read(ctx)
	if err != nil {
		return Status{}, fmt.Errorf("status of %s: %w", m.config.name().Messages(), err)
	}
	status := Status{Version: s.version, Latest: latest, Installation: s.installation}
	if s.version != latest {
		return status, nil
	}
	err = retry(ctx, m.database.transient, func() error {
		status.Drift, err = m.drift(ctx, s.name)
		return err
	})
	if err != nil {
		return Status{}, fmt.Errorf("status of %s: %w", s.name.Messages(), err)
	}
	return status, nil
}

// column is a column of a table, as it is or as it should be.
type column struct {
	name    string
	typ     string // as the catalog says; in lower case on SQLite
	lite    string // the same on SQLite, in what should be
	notNull bool
}

// index is an index of the message table.
type index struct {
	suffix  string // of its name, in what should be
	columns string // separated by a comma and a space
	partial bool
	invalid bool
}

const (
	instant = "timestamp with time zone"
	notNull = true
)

// What version 1 creates.
var (
	messageColumns = []column{
		{"id", "bigint", "integer", notNull},
		{"inserted_at", instant, "integer", notNull},
		{"scheduled_at", instant, "integer", !notNull},
		{"delivered_at", instant, "integer", !notNull},
		{"dead_at", instant, "integer", !notNull},
		{"due_at", instant, "integer", !notNull},
		{"attempts", "integer", "integer", notNull},
		{"partition", "smallint", "integer", notNull},
		{"partitions", "smallint", "integer", notNull},
		{"outbox", "text", "text", notNull},
		{"status", "text", "text", notNull},
		{"group_key", "text", "text", !notNull},
		{"type", "text", "text", notNull},
		{"headers", "jsonb", "text", notNull},
		{"payload", "bytea", "blob", notNull},
		{"last_error", "text", "text", !notNull},
	}
	metaColumns = []column{
		{"outbox", "text", "text", notNull},
		{"schema_version", "integer", "integer", !notNull},
		{"installation", "text", "text", !notNull},
		{"partitions", "integer", "integer", notNull},
		{"superseded", "text", "text", notNull},
		{"ordering", "text", "text", notNull},
		{"epoch", "bigint", "integer", notNull},
		{"paused_at", instant, "integer", !notNull},
	}
	messageIndexes = []index{
		{suffix: "_ready", columns: "outbox, partitions, partition, id"},
		{suffix: "_due", columns: "outbox, partitions, partition, scheduled_at, id"},
		{suffix: "_failed", columns: "outbox, partitions, partition, id"},
		{suffix: "_dead", columns: "outbox, partitions, partition, id"},
		{suffix: "_dead_at", columns: "outbox, dead_at"},
		{suffix: "_delivered", columns: "outbox, delivered_at"},
	}
)

func (m *Migrator) drift(ctx context.Context, name tables.Name) ([]string, error) {
	var drift []string
	for _, t := range []struct {
		table string
		want  []column
	}{{name.Table, messageColumns}, {name.MetaName(), metaColumns}} {
		found, err := m.database.columns(ctx, m.db, name, t.table)
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			drift = append(drift, fmt.Sprintf("table %q is missing", t.table))
			continue
		}
		for _, want := range t.want {
			if m.config.Dialect == SQLite {
				want.typ = want.lite
			}
			drift = append(drift, want.compare(t.table, found)...)
		}
	}
	found, err := m.database.indexes(ctx, m.db, name)
	if err != nil {
		return nil, err
	}
	for _, want := range messageIndexes {
		drift = append(drift, want.compare(name.IndexName(want.suffix), found)...)
	}
	return drift, nil
}

func (want column) compare(table string, found map[string]column) (drift []string) {
	say := func(format string, a ...any) {
		drift = append(drift, fmt.Sprintf("column %q of table %q ", want.name, table)+fmt.Sprintf(format, a...))
	}
	got, ok := found[want.name]
	switch {
	case !ok:
		say("is missing")
		return drift
	case got.typ != want.typ:
		say("has the type %s and not %s", got.typ, want.typ)
	}
	if got.notNull != want.notNull {
		say("%s NULL", map[bool]string{true: "does not allow", false: "allows"}[got.notNull])
	}
	return drift
}

func (want index) compare(name string, found map[string]index) (drift []string) {
	say := func(format string, a ...any) {
		drift = append(drift, fmt.Sprintf("index %q ", name)+fmt.Sprintf(format, a...))
	}
	got, ok := found[name]
	switch {
	case !ok:
		say("is missing")
		return drift
	case got.invalid:
		say("is invalid: REINDEX it")
	}
	if !strings.EqualFold(got.columns, want.columns) {
		say("is on (%s) and not (%s)", got.columns, want.columns)
	}
	if !got.partial {
		say("has no WHERE clause")
	}
	return drift
}
