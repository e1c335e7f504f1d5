package gormoutbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorm.io/gorm"
	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox/internal/testdb"
)

// C01
func TestNestedLevelsBehindAHelper(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		inTx := func(db *gorm.DB, fn func(tx *gorm.DB) error) error { return db.Transaction(fn) }
		for _, fail := range []error{nil, errRollBack} {
			db := b.open(t, gorm.Config{})
			var c calls
			err := inTx(db, func(tx *gorm.DB) error {
				c.add(t, tx, "M1")
				_ = inTx(tx, func(tx *gorm.DB) error {
					c.add(t, tx, "M2")
					_ = inTx(tx, func(tx *gorm.DB) error {
						c.add(t, tx, "M3")
						return errRollBack
					})
					c.add(t, tx, "M4")
					return nil
				})
				c.want(t)
				return fail
			})
			switch {
			case !errors.Is(err, fail):
				t.Errorf("the outer level returned %v, want %v", err, fail)
			case fail == nil:
				c.wantBoth(t, db, "M1", "M2", "M4")
				empty(t, db)
			default:
				c.wantBoth(t, db)
			}
		}
	})
}

func TestNestedLevelThatPanics(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		var c calls
		err := db.Transaction(func(tx *gorm.DB) error {
			c.add(t, tx, "outer")
			defer func() { _ = recover() }()
			return tx.Transaction(func(tx *gorm.DB) error {
				c.add(t, tx, "inner")
				panic("inner level")
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		c.wantBoth(t, db, "outer")
	})
}

// C10
func TestNestedTransactionsDisabled(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{DisableNestedTransaction: true})
		var c calls
		err := db.Transaction(func(tx *gorm.DB) error {
			_ = tx.Transaction(func(tx *gorm.DB) error {
				c.add(t, tx, "M1")
				return errRollBack
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		// GORM keeps the work of the inner level, and so are its functions.
		c.wantBoth(t, db, "M1")
	})
}

// C10
func TestRollbackToAnUnknownSavepoint(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		var c calls
		tx := db.Begin()
		c.add(t, tx, "M1")
		tx.SavePoint("known")
		c.add(t, tx, "M2")
		tx.RollbackTo("unknown")
		err := tx.Commit().Error
		if b.postgres {
			if err == nil {
				t.Error("the commit of an aborted transaction succeeded")
			}
			c.wantBoth(t, db)
			return
		}
		// SQLite's driver for GORM keeps the error to itself, and the
		// transaction goes on.
		if err != nil {
			t.Fatal(err)
		}
		c.wantBoth(t, db, "M1", "M2")
	})
}

// Each step is a savepoint statement or, with a plus, a row to add.
func TestFunctionsFollowSavepoints(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		steps, want string
		language    string // the only one that has it
	}{
		"rolled back":          {"+a, SAVEPOINT s, +b, ROLLBACK TO SAVEPOINT s, +c", "a c", ""},
		"twice":                {"SAVEPOINT s, +a, ROLLBACK TO s, +b, ROLLBACK TO s, +c", "c", ""},
		"released":             {"SAVEPOINT s, +a, RELEASE SAVEPOINT s, +b", "a b", ""},
		"outer after release":  {"SAVEPOINT o, +a, SAVEPOINT s, +b, RELEASE s, +c, ROLLBACK TO o, +d", "d", ""},
		"same name":            {"SAVEPOINT s, +a, SAVEPOINT s, +b, ROLLBACK TO s, +c", "a c", ""},
		"same name released":   {"SAVEPOINT s, +a, SAVEPOINT s, +b, RELEASE s, +c, ROLLBACK TO s", "", ""},
		"outer of two":         {"SAVEPOINT o, +a, SAVEPOINT s, +b, ROLLBACK TO o, +c", "c", ""},
		"release of the outer": {"SAVEPOINT x, +a, SAVEPOINT o, +b, SAVEPOINT s, +c, RELEASE o, ROLLBACK TO x", "", ""},
		"case":                 {"savepoint S, +a, Rollback To Savepoint s", "", ""},
		"quoted":               {`SAVEPOINT "my "" point", +a, ROLLBACK TO SAVEPOINT "my "" point", +b`, "b", ""},
		"quoted and not":       {`SAVEPOINT "point", +a, ROLLBACK TO POINT`, "", ""},
		"spaces":               {" \n SAVEPOINT\ts; , +a, rollback\n transaction to s ;", "", ""},
		"a keyword":            {"SAVEPOINT savepoint, +a, ROLLBACK TO savepoint", "", "postgres"},
		"beyond ASCII":         {"SAVEPOINT größe, +a, SAVEPOINT größer, +b, ROLLBACK TO größe", "", ""},
		"case in quotes":       {`SAVEPOINT s, +a, SAVEPOINT "S", +b, ROLLBACK TO s`, "", "postgres"},
		"no case in quotes":    {`SAVEPOINT "Point", +a, ROLLBACK TO point`, "", "sqlite"},
		"work":                 {"SAVEPOINT s, +a, ROLLBACK WORK TO s", "", "postgres"},
	}
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		for name, test := range tests {
			if test.language != "" && test.language != db.Name() {
				continue
			}
			t.Run(name, func(t *testing.T) {
				empty(t, db)
				var c calls
				err := db.Transaction(func(tx *gorm.DB) error {
					for step := range strings.SplitSeq(test.steps, ", ") {
						if row, ok := strings.CutPrefix(step, "+"); ok {
							c.add(t, tx, row)
						} else if err := tx.Exec(step).Error; err != nil {
							return fmt.Errorf("%s: %w", step, err)
						}
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				c.wantBoth(t, db, strings.Fields(test.want)...)
			})
		}
	})
}

// A statement that the database refused changed nothing.
func TestSavepointThatWasNotSet(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		var c calls
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		err := db.Transaction(func(tx *gorm.DB) error {
			own := from(t, tx)
			if err := tx.SavePoint("s").Error; err != nil {
				return err
			}
			c.add(t, tx, "dropped")
			if _, err := own.ExecContext(ended, "SAVEPOINT s"); err == nil {
				t.Error("a savepoint was set in an ended context")
			}
			if rows, err := own.QueryContext(ended, "SAVEPOINT s"); err == nil {
				defer rows.Close()
				t.Errorf("a savepoint was set in an ended context (%v)", rows.Err())
			}
			if row := tx.Statement.ConnPool.QueryRowContext(ended, "SAVEPOINT s"); row.Err() == nil && !b.cached && !b.session { // a cache returns an empty row
				t.Error("a savepoint was set in an ended context")
			}
			return tx.RollbackTo("s").Error
		})
		if err != nil {
			t.Fatal(err)
		}
		c.wantBoth(t, db)
	})
}

// A savepoint is followed whichever way its statement takes.
func TestSavepointsByEveryWayToRunSQL(t *testing.T) {
	t.Parallel()
	ways := map[string]func(tx *gorm.DB, query string) error{
		"Exec": func(tx *gorm.DB, query string) error { return tx.Exec(query).Error },
		"Scan": func(tx *gorm.DB, query string) error { return tx.Raw(query).Scan(&[]string{}).Error },
		"Rows": func(tx *gorm.DB, query string) error {
			rows, err := tx.Raw(query).Rows()
			if err != nil {
				return err
			}
			defer rows.Close()
			rows.Next()
			return rows.Err()
		},
		"Row": func(tx *gorm.DB, query string) error {
			_ = tx.Raw(query).Row().Scan(new(string)) // there is no row
			return nil
		},
		"connection": func(tx *gorm.DB, query string) error {
			_, err := tx.Statement.ConnPool.ExecContext(tx.Statement.Context, query)
			return err
		},
		"session": func(tx *gorm.DB, query string) error {
			return tx.Session(&gorm.Session{PrepareStmt: true}).Exec(query).Error
		},
	}
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		for name, run := range ways {
			t.Run(name, func(t *testing.T) {
				// The second time the cache has the statements of another
				// transaction.
				for range 2 {
					var c calls
					err := db.Transaction(func(tx *gorm.DB) error {
						if err := run(tx, "SAVEPOINT s"); err != nil {
							return err
						}
						c.add(t, tx, "dropped")
						if err := run(tx, "ROLLBACK TO s"); err != nil {
							return err
						}
						return nil
					})
					if err != nil {
						t.Fatal(err)
					}
					c.wantBoth(t, db)
				}
			})
		}
	})
}

// Whatever a transaction does, the functions called are those of the rows
// stored.
func TestFunctionsFollowRows(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{}, testdb.PoolSize(1))
		rapid.Check(t, func(r *rapid.T) {
			empty(t, db)
			var c calls
			m := &machine{t: t, c: &c, tx: db.Begin()}
			defer m.tx.Rollback() // if the check ends early
			r.Repeat(map[string]func(*rapid.T){
				"add":      m.add,
				"set":      m.set,
				"release":  m.release,
				"rollback": m.rollback,
				"nested":   m.nested,
			})
			if rapid.Bool().Draw(r, "commit") {
				if err := m.tx.Commit().Error; err != nil {
					r.Fatal(err)
				}
			} else {
				m.tx.Rollback()
			}
			if stored := names(t, db); !slices.Equal(stored, c.made) {
				r.Fatalf("rows stored: %q, functions called: %q", stored, c.made)
			}
		})
	})
}

// machine does steps of a transaction. Names of savepoints are few, so that
// they are often the same.
type machine struct {
	t    *testing.T
	c    *calls
	tx   *gorm.DB
	rows int
	open []string // what is set, by the database's rules
}

func (m *machine) add(*rapid.T) {
	m.rows++
	m.c.add(m.t, m.tx, fmt.Sprintf("r%d", m.rows))
}

func (m *machine) set(r *rapid.T) {
	name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(r, "name")
	m.exec(r, "SAVEPOINT "+name)
	m.open = append(m.open, name)
}

func (m *machine) release(r *rapid.T) {
	i := m.draw(r)
	m.exec(r, "RELEASE SAVEPOINT "+m.open[i])
	m.open = m.open[:i]
}

func (m *machine) rollback(r *rapid.T) {
	i := m.draw(r)
	m.exec(r, "ROLLBACK TO SAVEPOINT "+m.open[i])
	m.open = m.open[:i+1]
}

func (m *machine) nested(r *rapid.T) {
	fails := rapid.Bool().Draw(r, "fails")
	_ = m.tx.Transaction(func(tx *gorm.DB) error {
		m.rows++
		m.c.add(m.t, tx, fmt.Sprintf("r%d", m.rows))
		if fails {
			return errRollBack
		}
		return nil
	})
}

// draw returns the place of a savepoint that a statement with its name would
// mean: the innermost.
func (m *machine) draw(r *rapid.T) int {
	if len(m.open) == 0 {
		r.Skip("none is set")
	}
	name := rapid.SampledFrom(m.open).Draw(r, "name")
	for i := len(m.open) - 1; ; i-- {
		if m.open[i] == name {
			return i
		}
	}
}

func (m *machine) exec(r *rapid.T, query string) {
	if err := m.tx.Exec(query).Error; err != nil {
		r.Fatal(err)
	}
}
