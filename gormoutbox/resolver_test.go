package gormoutbox_test

import (
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	"gorm.io/plugin/dbresolver"

	"github.com/gormoutbox/outbox/gormoutbox"
)

// plugin installs the way an outbox does.
type plugin struct {
	initialized int
}

func (*plugin) Name() string { return "test" }

func (p *plugin) Initialize(db *gorm.DB) error {
	p.initialized++
	return gormoutbox.Install(db)
}

// cluster is three databases, each with one row that bears its name.
type cluster struct {
	primary, source, replica *sql.DB
}

func newCluster(t *testing.T, b *bench) *cluster {
	t.Helper()
	c := &cluster{primary: b.sql(t), source: b.sql(t), replica: b.sql(t)}
	for name, pool := range map[string]*sql.DB{"primary": c.primary, "source": c.source, "replica": c.replica} {
		for _, query := range []string{
			"CREATE TABLE rows (id integer, name text)", "CREATE TABLE hookeds (id integer, name text)",
			fmt.Sprintf("INSERT INTO rows (name) VALUES ('%s')", name),
		} {
			if _, err := pool.ExecContext(t.Context(), query); err != nil {
				t.Fatal(err)
			}
		}
	}
	return c
}

// open opens a handle, with install and dbresolver in an order.
func (c *cluster) open(t *testing.T, b *bench, sources, resolverFirst bool, install func(*gorm.DB) error) *gorm.DB {
	t.Helper()
	db, err := gorm.Open(b.dialector(c.primary), &gorm.Config{Logger: logger.Discard, PrepareStmt: b.cached})
	if err != nil {
		t.Fatal(err)
	}
	config := dbresolver.Config{Replicas: []gorm.Dialector{b.dialector(c.replica)}}
	if sources {
		config.Sources = []gorm.Dialector{b.dialector(c.source)}
	}
	steps := []func(*gorm.DB) error{install, func(db *gorm.DB) error { return db.Use(dbresolver.Register(config)) }}
	if resolverFirst {
		slices.Reverse(steps)
	}
	for _, step := range steps {
		if err := step(db); err != nil {
			t.Fatal(err)
		}
	}
	return b.use(db)
}

// rows lists the names of the rows that were added, by a way past GORM.
func rows(t *testing.T, db *sql.DB) (list []string) {
	t.Helper()
	result, err := db.QueryContext(t.Context(), "SELECT name FROM rows WHERE name < 'a' ORDER BY name")
	if err != nil {
		t.Fatal(err)
	}
	defer result.Close()
	for result.Next() {
		var name string
		if err := result.Scan(&name); err != nil {
			t.Fatal(err)
		}
		list = append(list, name)
	}
	if err := result.Err(); err != nil {
		t.Fatal(err)
	}
	return list
}

func TestWithDBResolver(t *testing.T) {
	t.Parallel()
	use := func(db *gorm.DB) error { return db.Use(&plugin{}) }
	onEach(t, func(t *testing.T, b *bench) {
		c := newCluster(t, b)
		for what, install := range map[string]func(*gorm.DB) error{"install": gormoutbox.Install, "plugin": use} {
			for _, first := range []bool{false, true} {
				for _, sources := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s, resolver first %t, sources %t", what, first, sources), func(t *testing.T) {
						db := c.open(t, b, sources, first, install)
						c.statements(t, db, sources)
						c.transactions(t, db, sources)
					})
				}
			}
		}
	})
}

// statements checks that what dbresolver does outside transactions is the same
// as ever.
func (c *cluster) statements(t *testing.T, db *gorm.DB, sources bool) {
	written := "primary"
	if sources {
		written = "source"
	}
	for _, db := range []*gorm.DB{db, db.Session(&gorm.Session{SkipDefaultTransaction: true})} {
		var row Row
		read := func(what, want string, db *gorm.DB) {
			t.Helper()
			if db.Error != nil || row.Name != want {
				t.Errorf("%s read %q (%v), want %q", what, row.Name, db.Error, want)
			}
			row = Row{}
		}
		changed := func(what string, db *gorm.DB) {
			t.Helper()
			if db.Error != nil || db.RowsAffected != 1 {
				t.Errorf("%s changed %d rows (%v)", what, db.RowsAffected, db.Error)
			}
		}
		read("Take", "replica", db.Take(&row))
		read("Raw", "replica", db.Raw("SELECT name FROM rows").Scan(&row))
		read("Take for writing", written, db.Clauses(dbresolver.Write).Take(&row))
		changed("Create", db.Omit("ID").Create(&Row{Name: "new"}))
		changed("Exec", db.Exec("UPDATE rows SET name = ? WHERE name = ?", "newer", "new"))
		changed("Update", db.Model(&Row{}).Where("name = ?", "newer").Update("name", "newest"))
		read("Take what was written", "newest", db.Clauses(dbresolver.Write).Where("name = ?", "newest").Take(&row))
		changed("Delete", db.Where("name = ?", "newest").Delete(&Row{}))
	}
	if pool, err := gormoutbox.Primary(db.Clauses(dbresolver.Read)); pool != c.primary || err != nil {
		t.Errorf("Primary is not that of gorm.Open (%v)", err)
	}
	c.wantRows(t)
}

// transactions checks that all are seen, and run where dbresolver wants.
func (c *cluster) transactions(t *testing.T, db *gorm.DB, sources bool) {
	var calls calls
	inside := func(name string) func(*gorm.DB) error {
		return func(tx *gorm.DB) error { calls.add(t, tx, name); return nil }
	}
	begun := func(name string, tx *gorm.DB) error {
		calls.add(t, tx, name)
		return tx.Commit().Error
	}
	written := func() *gorm.DB { return db.Clauses(dbresolver.Write) }
	err := errors.Join(
		db.Transaction(inside("1")),
		begun("2", db.Begin()),
		begun("3", written().Begin()),
		begun("4", db.Clauses(dbresolver.Read).Begin()),
		written().Transaction(func(tx *gorm.DB) error {
			return tx.Omit("ID").Create(&Hooked{Name: "5", hook: inside("5")}).Error
		}),
		db.Omit("ID").Create(&Hooked{Name: "6", hook: inside("6")}).Error,
		db.Model(&Hooked{hook: inside("7")}).Where("name = ?", "6").Update("name", "7").Error,
		db.Where("name = ?", "7").Delete(&Hooked{hook: inside("8")}).Error,
	)
	if err != nil {
		t.Error(err)
	}
	rolledBack := written().Begin()
	calls.add(t, rolledBack, "9")
	rolledBack.Rollback()
	calls.want(t, "1", "2", "3", "4", "5", "6", "7", "8")
	if sources {
		c.wantRows(t, "1 2", "3 5 6 7 8", "4")
	} else {
		c.wantRows(t, "1 2 3 5 6 7 8", "", "4")
	}
}

// wantRows checks which rows there are beside those of the beginning, in the
// primary, the source and the replica, and deletes them.
func (c *cluster) wantRows(t *testing.T, want ...string) {
	t.Helper()
	for i, pool := range []*sql.DB{c.primary, c.source, c.replica} {
		wanted := ""
		if want != nil {
			wanted = want[i]
		}
		if got := strings.Join(rows(t, pool), " "); got != wanted {
			t.Errorf("database %d has the rows %q, want %q", i, got, wanted)
		}
		if _, err := pool.ExecContext(t.Context(), "DELETE FROM rows WHERE name < 'a'"); err != nil {
			t.Fatal(err)
		}
	}
}

// dbresolver opens its pools with the plugins of the first, and limits those
// that it was given.
func TestDBResolverInitializesAgain(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.bare(gorm.Config{})
		p := &plugin{}
		if err := db.Use(p); err != nil {
			t.Fatal(err)
		}
		pool := db.ConnPool
		replica := b.sql(t)
		dr := dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{b.dialector(replica)}})
		if err := db.Use(dr); err != nil {
			t.Fatal(err)
		}
		if p.initialized != 2 {
			t.Errorf("initialized %d times, want 2", p.initialized)
		}
		if db.ConnPool != pool {
			t.Error("the first pool was wrapped again")
		}
		log := newRecorder()
		dr.DB = db.Session(&gorm.Session{Logger: log})
		dr.SetMaxOpenConns(4).SetMaxIdleConns(4).SetConnMaxLifetime(time.Hour).SetConnMaxIdleTime(time.Hour)
		if len(log.errors) != 0 {
			t.Errorf("dbresolver says %q", log.errors)
		}
		primary, err := db.DB()
		if err != nil {
			t.Fatal(err)
		}
		for _, pool := range []*sql.DB{primary, replica} {
			if n := pool.Stats().MaxOpenConnections; n != 4 {
				t.Errorf("there are %d connections, want the 4 that dbresolver set", n)
			}
		}
	})
}
