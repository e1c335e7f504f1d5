package dialect

import (
	"context"
	"database/sql"
	"strconv"
	"time"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

// Admin gives the administration of the storage's tables.
func (s *SQLite) Admin() *Admin {
	a := newAdmin(liteAdmin{s})
	for name, o := range s.outboxes {
		a.outboxes[name] = o.table
	}
	return a
}

// liteAdmin is the adminSyntax of SQLite. Instants are numbers of microseconds
// and come from the storage's clock.
type liteAdmin struct{ storage *SQLite }

func (liteAdmin) bind(n int) string            { return "?" + strconv.Itoa(n) }
func (l liteAdmin) now() string                { return strconv.FormatInt(l.storage.micros(), 10) }
func (liteAdmin) epoch() string                { return "0" }
func (liteAdmin) micros(instant string) string { return instant }
func (liteAdmin) idList(ids []int64) string    { return jsonArray(ids) }
func (liteAdmin) size(column string) string    { return "length(" + column + ")" }

func (liteAdmin) using(name tables.Name, s source) string {
	return name.Messages() + " INDEXED BY " + name.Index(s.index())
}

func (l liteAdmin) ago(d time.Duration) string {
	return strconv.FormatInt(l.storage.micros()-d.Microseconds(), 10)
}

func (liteAdmin) amongIDs(arg string) string {
	return "id IN (SELECT value FROM json_each(" + arg + "))"
}

func (liteAdmin) contains(column, arg string) string {
	return "instr(" + column + ", " + arg + ") > 0"
}

func (l liteAdmin) read(ctx context.Context, _ bool, fn func(engine.Tx) error) error {
	return retryBusy(ctx, func() error { return fn(l.storage.db) })
}

func (l liteAdmin) write(ctx context.Context, fn func(engine.Tx) error) error {
	return l.storage.write(ctx, func(c *sql.Conn) error { return fn(c) })
}

// owners knows nobody: ownership is in the memory of the process that relays.
func (liteAdmin) owners(context.Context, engine.Tx, tables.Name, []string) (map[laneKey]Owner, error) {
	return nil, nil
}
