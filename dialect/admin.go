package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

// Admin is what operators do with the tables of a storage: look, retry, kill,
// discard, pause, and change the number of partitions. It needs no worker, and
// its methods are safe for concurrent use with each other and with workers.
//
// Both databases share its SQL, apart from what adminSyntax holds.
type Admin struct {
	syntax   adminSyntax
	outboxes map[string]tables.Name
	window   int // the number of ids that a change looks up at a time
}

func newAdmin(syntax adminSyntax) *Admin {
	return &Admin{syntax: syntax, outboxes: make(map[string]tables.Name), window: changeWindow}
}

// adminSyntax is how one database says what the other says differently.
type adminSyntax interface {
	// bind is the placeholder of the n-th argument, from 1.
	bind(n int) string
	// now, epoch and ago are instants in the form that a time column holds.
	now() string
	epoch() string
	ago(d time.Duration) string
	// using names the table with the index of a source, where a statement can
	// say which one it means.
	using(name tables.Name, s source) string
	// micros turns an instant into microseconds since 1970.
	micros(instant string) string
	// amongIDs says that id is in the list that idList made an argument of.
	amongIDs(arg string) string
	idList(ids []int64) string
	// contains says that a text column contains the text arg.
	contains(column, arg string) string
	// size is the length of a column in bytes.
	size(column string) string

	// read runs fn, which only reads and may be called several times. A walk
	// follows indexes and sorts next to nothing.
	read(ctx context.Context, walk bool, fn func(engine.Tx) error) error
	// write runs fn in a transaction of its own, that sees what others have
	// committed before each of its statements, and again after a conflict.
	write(ctx context.Context, fn func(engine.Tx) error) error
	// owners tells who owns lanes of the outboxes, all of one table, as far
	// as the database knows.
	owners(ctx context.Context, tx engine.Tx, name tables.Name, outboxes []string) (map[laneKey]Owner, error)
}

// table finds the table of an outbox.
func (a *Admin) table(outbox string) (tables.Name, error) {
	name, ok := a.outboxes[outbox]
	if !ok {
		return tables.Name{}, fmt.Errorf("unknown outbox %q", outbox)
	}
	return name, nil
}

// byTable gives the outboxes of each table, tables and outboxes in order.
func (a *Admin) byTable() (names []tables.Name, outboxes map[tables.Name][]string) {
	outboxes = make(map[tables.Name][]string)
	for _, outbox := range slices.Sorted(maps.Keys(a.outboxes)) {
		name := a.outboxes[outbox]
		if outboxes[name] == nil {
			names = append(names, name)
		}
		outboxes[name] = append(outboxes[name], outbox)
	}
	return names, outboxes
}

// statement is a text under construction with its arguments.
type statement struct {
	syntax adminSyntax
	name   tables.Name
	text   strings.Builder
	args   []any
}

func (a *Admin) statement(name tables.Name) *statement {
	return &statement{syntax: a.syntax, name: name}
}

// arg adds an argument and returns its placeholder.
func (s *statement) arg(v any) string {
	s.args = append(s.args, v)
	return s.syntax.bind(len(s.args))
}

// add appends to the text. In it {messages} and {meta} stand for the tables, and
// what source.table gives for the messages by the index of a source. Names are
// put in last, so that nothing in them is taken for a part of the text.
func (s *statement) add(text string) {
	names := []string{"{messages}", s.name.Messages(), "{meta}", s.name.Meta()}
	for _, source := range allSources {
		names = append(names, source.table(), s.syntax.using(s.name, source))
	}
	s.text.WriteString(strings.NewReplacer(names...).Replace(text))
}

func (s *statement) addf(format string, a ...any) { s.add(fmt.Sprintf(format, a...)) }

// exec returns the number of affected rows.
func (s *statement) exec(ctx context.Context, tx engine.Tx) (int, error) {
	result, err := tx.ExecContext(ctx, s.text.String(), s.args...)
	if err != nil {
		return 0, err
	}
	n, err := result.RowsAffected()
	return int(n), err
}

// query calls scan for each row.
func (s *statement) query(ctx context.Context, tx engine.Tx, scan func(*sql.Rows) error) error {
	rows, err := tx.QueryContext(ctx, s.text.String(), s.args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// microTime is the instant of a nullable number of microseconds; zero if NULL.
func microTime(v sql.NullInt64) time.Time {
	if !v.Valid {
		return time.Time{}
	}
	return time.UnixMicro(v.Int64).UTC()
}
